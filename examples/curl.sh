#!/bin/sh
# The HTTP API from a shell: sh examples/curl.sh http://127.0.0.1:8000
set -eu
url=${1:-http://127.0.0.1:8000}
key=${CASCADE_API_KEY:-none}

ask() {
    curl --fail-with-body --silent --show-error --no-buffer -H "Authorization: Bearer $key" "$@"
    echo
}

ask "$url/health"
ask "$url/v1/models"
ask "$url/tokenize" -H 'Content-Type: application/json' -d '{"prompt": "def fibonacci(n):"}'
ask "$url/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0}'
ask "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "import os"}], "max_tokens": 16, "stream": true,
         "stream_options": {"include_usage": true}, "speculation": {"mode": "off"}}'
ask "$url/metrics"
