"""A server as one writes it who has the export and no library: a call for a request.

    python benchmarks/plain_server.py FOLDER --port 8001

The peer of benchmarks/serving.py that can be run wherever the library can.
"""

import argparse

import ctranslate2
import uvicorn
from sentencepiece import SentencePieceProcessor
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", help="what export wrote for CTranslate2")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--beam-size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of one translation")
    parser.add_argument("--at-once", type=int, default=1, help="translations at once")
    given = parser.parse_args()
    processor = SentencePieceProcessor(model_file=f"{given.folder}/tokenizer.model")
    engine = ctranslate2.Translator(
        given.folder, intra_threads=given.threads, inter_threads=given.at_once
    )

    def translated(text: str) -> str:
        pieces = processor.encode(text, out_type=str)
        (found,) = engine.translate_batch([pieces], beam_size=given.beam_size)
        return processor.decode(found.hypotheses[0])

    async def answer(request: Request) -> JSONResponse:
        text = (await request.json())["q"]
        return JSONResponse(
            {"translatedText": await run_in_threadpool(translated, text)}
        )

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    app = Starlette(
        routes=[
            Route("/translate", answer, methods=["POST"]),
            Route("/health", health),
        ]
    )
    uvicorn.run(app, port=given.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
