# A writer earns the share of lower-case letters in what it says; a checker looks on. $PYTHON, without
# any package, makes the calls where there is no curl.
set -eu
export LC_ALL=C
question=$(sed -n 's/.*"q":"\([^"]*\)".*/\1/p' "$LIGHTSPAN_TASK_FILE")

ask() { # agent, text, limit, temperature: what the model answers
    "$PYTHON" -I -S -c '
import json, os, sys, urllib.request
agent, text, limit, temperature = sys.argv[1:]
url = os.environ["LIGHTSPAN_GATEWAY_URL"] + "/agents/" + agent + "/v1/chat/completions"
body = {"model": "any", "messages": [{"role": "user", "content": text}]}
body |= {"max_tokens": int(limit), "temperature": float(temperature)}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
sys.stdout.buffer.write(answer["choices"][0]["message"]["content"].encode() + b".")
' "$@"
}

text=$(ask writer "$question" 6 1)
text=${text%.}
ask checker "Is it fine?" 4 0 >/dev/null
letters=$(printf %s "$text" | tr -cd 'a-z' | wc -c)
all=$(printf %s "$text" | wc -c)
echo "$question" >&2
awk -v letters="$letters" -v all="$all" 'BEGIN { print (all > 0 ? letters / all : 0) }'
