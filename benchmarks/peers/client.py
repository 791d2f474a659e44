"""The client of the served part: ``vllm bench serve``, imported once and run for each line of arguments.

    python -m benchmarks.peers.client

Runs in vLLM's environment. A line is a JSON list of arguments of ``vllm bench serve``; the answer is its result, as JSON.
"""

import json
import sys
import traceback

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks.peers.worker import answers


def run() -> None:
    out = answers()
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        try:
            result = main(parser.parse_args(json.loads(line)))
            print(json.dumps(result, default=str), file=out)
        except (Exception, SystemExit) as error:  # of any library; argparse ends the program
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)


if __name__ == "__main__":
    run()
