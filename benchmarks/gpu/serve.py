"""Start some of the benchmarks' servers and keep them running, so that parts do not wait for them one by one.

    python -m benchmarks.gpu.serve FOLDER FILE "default" "second"

FILE, in the folder SPARRING_BENCH_SERVERS, gets their URLs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from benchmarks.gpu._servers import running


async def main(model: Path, urls_file: Path, names: list[str]) -> None:
    async with running(model, *names, logs=urls_file.parent) as urls:
        print(urls, flush=True)
        good = {name: url for name, url in urls.items() if not url.startswith("error")}
        await asyncio.to_thread(urls_file.write_text, json.dumps(good))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
