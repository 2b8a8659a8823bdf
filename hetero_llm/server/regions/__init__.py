"""Cuts the text of a sequence, while it is generated, into reasoning, content and tool calls.

`formats` describes how models write these; `region_parser` reads any text by such a description.
"""
