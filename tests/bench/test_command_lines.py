"""Every bench can be imported and tells its arguments where only the engine's packages are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ABSENT = (
    *("fastapi", "uvicorn", "msgspec", "aiohttp", "httpx", "matplotlib", "PIL"),
    *("llama_cpp", "gguf", "openvino", "openvino_genai", "vllm"),
)
# In environments of their own, which have what they compare us with.
PEERS = "bench/cpu_peers/"

_PROGRAM = """
import contextlib, importlib, io, sys

sys.modules.update(dict.fromkeys({absent!r}))  # imports of these fail
for name in {names!r}:
    sys.argv, said = [name, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            importlib.import_module(name).main()
        print(name, "ran")
    except SystemExit as end:
        assert not end.code and said.getvalue().startswith("usage:"), name
    except BaseException as error:
        print(name, repr(error))
"""


def test_help_of_every_bench() -> None:
    paths = (path.relative_to(ROOT) for path in (ROOT / "bench").rglob("*.py"))
    names = [
        ".".join(path.with_suffix("").parts)
        for path in sorted(paths)
        if not path.as_posix().startswith(PEERS) and "__main__" in (ROOT / path).read_text()
    ]
    assert len(names) > 50
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(absent=ABSENT, names=names)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
