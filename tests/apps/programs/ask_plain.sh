# A program in the POSIX shell where there is no curl: $PYTHON, without any package, makes its calls.
set -eu
task=$LIGHTSPAN_TASK
number=$(printf %s "$task" | sed -n 's/.*"number":\([0-9]*\).*/\1/p')

ask() { # endpoint, model, text: what the model answers
    "$PYTHON" -I -S -c '
import json, os, sys, urllib.request
url, model, text = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": text}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(asked))
print(answer["choices"][0]["message"]["content"])
' "$@"
}

ask "$LIGHTSPAN_GATEWAY_URL/agents/planner/v1" any "plan $number" >&2
ask "$LIGHTSPAN_GATEWAY_URL/agents/team/writer/v1" any "write $number" >&2
ask "$OPENAI_BASE_URL" editor "edit $number" >&2
ask "$OPENAI_BASE_URL" "$LIGHTSPAN_MODEL" "$number"
