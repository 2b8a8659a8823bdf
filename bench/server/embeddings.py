"""Embeddings on a CPU: `LLM.embed` and POST /v1/embeddings against transformers in batches of 32.

    python -m bench.server.embeddings [--texts 256] [--rounds 3] [--clients 1,8,32] [--out FILE]

The model has the shape of all-MiniLM-L6-v2 (6 layers, 384 wide) with random weights, in float32.
Texts have 4 to 480 words of one token each, most of them few (log-normal, median 48), in random
order. All arms tokenize, pool the mean, scale to length 1, and use the same number of torch
threads; the first four follow each other in one process, in a random order, `--rounds` times, and
figures are medians. CPU seconds are those of all threads of the process: with one thread they say
what an arm costs, whatever else the machine does.

"by length, 32": sentence-transformers' `encode`: texts sorted by length, 32 a batch, padded.
"as they come, 32": the same without sorting. "one at a time": what a server without batching does.
The server runs as users start it, with `hetero-llm serve`; clients are on the same machine, and
each sends one text after the other over a connection of its own.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from bench.common import Rows, bench_parser, numbers, print_table, report
from bench.server.processes import serving
from hetero_llm import LLM

WORDS = 30_000
BATCH = 32
Arm = Callable[[list[str]], np.ndarray]


def make_model(folder: Path) -> None:
    """A random model with a tokenizer of one token a word, and sentence-transformers' files."""
    torch.manual_seed(0)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate([*specials, *(f"w{i}" for i in range(WORDS))])}
    config = transformers.BertConfig(
        vocab_size=len(vocab), hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536, max_position_embeddings=512,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)  # fmt: skip
    names = "Transformer", "Pooling", "Normalize"
    modules = ", ".join(
        f'{{"idx": {i}, "path": "{i}_{name}" , "type": "sentence_transformers.models.{name}"}}'
        for i, name in enumerate(names)
    ).replace("0_Transformer", "")
    (folder / "modules.json").write_text(f"[{modules}]")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


def make_texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(48), 0.9, count), 4, 480).astype(int)
    return [" ".join(f"w{i}" for i in rng.integers(0, WORDS, length)) for length in lengths]


class Transformers:
    """transformers' own class and tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def by_length(self, texts: list[str]) -> np.ndarray:
        order = np.argsort([-len(text) for text in texts], kind="stable")
        found = self.as_they_come([texts[place] for place in order])
        return found[np.argsort(order)]

    def as_they_come(self, texts: list[str], size: int = BATCH) -> np.ndarray:
        parts = [self._batch(texts[low : low + size]) for low in range(0, len(texts), size)]
        return np.concatenate(parts)

    def one_at_a_time(self, texts: list[str]) -> np.ndarray:
        return self.as_they_come(texts, 1)

    @torch.inference_mode()
    def _batch(self, texts: list[str]) -> np.ndarray:
        inputs = self._tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        hidden = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1).numpy()


def offline(folder: Path, texts: list[str], rounds: int, threads: int) -> Rows:
    """Texts and tokens a second of each arm; all arms have to agree."""
    theirs = Transformers(folder)
    taken: dict[str, list[tuple[float, float]]] = {}
    order = np.random.default_rng(2)
    with LLM(str(folder), device="cpu", cpu_threads=threads) as llm:

        def ours(texts: list[str]) -> np.ndarray:
            outputs = llm.embed(texts, use_tqdm=False)
            return np.array([one.outputs.embedding for one in outputs])

        arms: dict[str, Arm] = {
            "LLM.embed": ours,
            f"transformers, by length, {BATCH}": theirs.by_length,
            f"transformers, as they come, {BATCH}": theirs.as_they_come,
            "transformers, one at a time": theirs.one_at_a_time,
        }
        for arm in arms.values():
            arm(texts[:BATCH])
        for _ in range(rounds):
            wanted = None
            for place in order.permutation(len(arms)):
                name, arm = list(arms.items())[place]
                begun, cpu = time.perf_counter(), time.process_time()
                found = arm(texts)
                spent = time.perf_counter() - begun, time.process_time() - cpu
                taken.setdefault(name, []).append(spent)
                wanted = found if wanted is None else wanted
                np.testing.assert_allclose(found, wanted, atol=1e-5)
    rows = []
    for name in arms:
        wall, cpu = np.median(np.array(taken[name]), axis=0).tolist()
        rows.append(
            {"arm": name, "texts_per_s": len(texts) / wall, "texts_per_cpu_s": len(texts) / cpu}
        )
    return rows


def over_http(folder: Path, texts: list[str], clients: list[int], threads: int) -> Rows:
    """Texts a second, latencies in ms and inputs of a step by number of clients."""
    words = ("serve", str(folder), "--device=cpu", f"--cpu-threads={threads}",
             "--disable-log-requests", "--uvicorn-log-level=warning")  # fmt: skip
    rows: Rows = []
    with serving(*words) as server:
        load(server.url, texts[:BATCH], 4)
        for count in clients:
            before = steps_of(server.url)
            begun = time.perf_counter()
            latencies = load(server.url, texts, count)
            seconds = time.perf_counter() - begun
            p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
            rows.append(
                {
                    "clients": count, "texts_per_s": len(texts) / seconds,
                    "p50_ms": float(p50), "p99_ms": float(p99),
                    "texts_per_step": len(texts) / (steps_of(server.url) - before),
                }
            )  # fmt: skip
    return rows


def load(url: str, texts: list[str], clients: int) -> list[float]:
    """Seconds of each request."""

    import httpx

    def client(own: list[str]) -> list[float]:
        taken = []
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
            for text in own:
                begun = time.perf_counter()
                body = {"input": text, "encoding_format": "base64"}
                http.post("/v1/embeddings", json=body).raise_for_status()
                taken.append(time.perf_counter() - begun)
        return taken

    with ThreadPoolExecutor(clients) as pool:
        parts = pool.map(client, [texts[place::clients] for place in range(clients)])
        return [seconds for part in parts for seconds in part]


def steps_of(url: str) -> int:
    """The server's steps so far; its figures are at most a tenth of a second old."""
    time.sleep(0.3)
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    (line,) = (one for one in text.splitlines() if one.startswith("hetero_llm:num_steps_total"))
    return int(float(line.rpartition(" ")[2]))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=numbers, default=[1, 8, 32])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        texts = make_texts(args.texts, seed=1)
        rows = offline(folder, texts, args.rounds, args.threads)
        served = over_http(folder, texts, args.clients, args.threads)
        print_table(served)
    about = {
        "served": served, "texts": args.texts, "threads": args.threads, "dtype": "float32",
        "model": "6 layers, 384 wide, random",
    }  # fmt: skip
    report("embeddings.c", about, rows, args.out)


if __name__ == "__main__":
    main()
