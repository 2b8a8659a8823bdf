"""From what a user sends to a request: prompts, chats, images, adapters, sampling defaults."""
