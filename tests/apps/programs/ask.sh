# A program in the POSIX shell with curl. Needs nothing of lightspan.
set -eu
task=$(cat "$LIGHTSPAN_TASK_FILE")
number=$(printf %s "$task" | sed -n 's/.*"number":\([0-9]*\).*/\1/p')

ask() { # endpoint, model, text: what the model answers
    answer=$(curl --silent --show-error --fail "$1/chat/completions" \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header 'Content-Type: application/json' \
        --data "{\"model\":\"$2\",\"messages\":[{\"role\":\"user\",\"content\":\"$3\"}]}")
    echo "$answer" | sed -n 's/.*"content":"\([^"]*\)".*/\1/p'
}

ask "$LIGHTSPAN_GATEWAY_URL/agents/planner/v1" any "plan $number" >&2
ask "$LIGHTSPAN_GATEWAY_URL/agents/team/writer/v1" any "write $number" >&2
ask "$OPENAI_BASE_URL" editor "edit $number" >&2
ask "$OPENAI_BASE_URL" "$LIGHTSPAN_MODEL" "$number"
