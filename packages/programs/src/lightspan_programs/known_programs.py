"""The coding agents that `CodingAgent` knows: arguments, configuration, switches, side calls."""

from __future__ import annotations

from typing import Final

from lightspan_programs.command import system
from lightspan_programs.specs import ProgramSpec

AIDER: Final = ProgramSpec(
    arguments=(
        *("aider", "--model", "openai/$LIGHTSPAN_MODEL", "--yes-always", "--no-check-update"),
        *("--no-analytics", "--no-show-model-warnings", "--no-show-release-notes", "--no-pretty"),
        *("--no-gitignore", "--no-detect-urls", "--message", "$INSTRUCTION"),
    ),
    env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    agents={"commit_message": system("You are an expert software engineer that generates*commit*")},
    install="pip install aider-chat",
)

CLAUDE_CODE: Final = ProgramSpec(
    arguments=(
        *("claude", "-p", "$INSTRUCTION", "--model", "$LIGHTSPAN_MODEL"),
        *("--permission-mode", "acceptEdits", "--allowedTools", "Bash Edit Read Write"),
    ),
    env={
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line of the system prompt that changes by call
        "DISABLE_AUTOUPDATER": "1",
    },
    install="npm install -g @anthropic-ai/claude-code",
)

CODEX: Final = ProgramSpec(
    arguments=(
        *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        "$INSTRUCTION",
    ),
    files={
        # it reads no base URL from the environment
        ".codex/config.toml": """\
model = "$LIGHTSPAN_MODEL"
model_provider = "lightspan"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.lightspan]
name = "lightspan"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[features]
multi_agent = false

[analytics]
enabled = false
"""
    },
    install="npm install -g @openai/codex",
)

MINI_SWE_AGENT: Final = ProgramSpec(
    arguments=(
        *("mini", "-y", "--exit-immediately", "-m", "openai/$LIGHTSPAN_MODEL"),
        *("-t", "$INSTRUCTION"),
    ),
    env={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    install="pip install mini-swe-agent",
)

OPENCODE: Final = ProgramSpec(
    arguments=("opencode", "run", "--model", "lightspan/$LIGHTSPAN_MODEL", "$INSTRUCTION"),
    files={
        ".config/opencode/opencode.json": """\
{
  "provider": {
    "lightspan": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
      "models": {"$LIGHTSPAN_MODEL": {}}
    }
  },
  "autoupdate": false,
  "share": "disabled",
  "permission": "allow"
}
"""
    },
    env={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    },
    agents={"title": system("You are a title generator*")},
    install="npm install -g opencode-ai",
)

PI: Final = ProgramSpec(
    arguments=(
        *("pi", "-p", "--provider", "lightspan", "--model", "$LIGHTSPAN_MODEL"),
        *("--no-session", "$INSTRUCTION"),
    ),
    files={
        ".pi/agent/models.json": """\
{
  "providers": {
    "lightspan": {
      "baseUrl": "$OPENAI_BASE_URL",
      "apiKey": "OPENAI_API_KEY",
      "api": "openai-completions",
      "models": [{"id": "$LIGHTSPAN_MODEL"}]
    }
  }
}
"""
    },
    env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
    install="npm install -g @mariozechner/pi-coding-agent",
)

QWEN_CODE: Final = ProgramSpec(
    arguments=(
        *("qwen", "--auth-type", "openai", "--approval-mode", "yolo", "-p", "$INSTRUCTION"),
    ),
    files={
        ".qwen/settings.json": """\
{
  "telemetry": {"enabled": false},
  "privacy": {"usageStatisticsEnabled": false},
  "general": {"disableAutoUpdate": true, "disableUpdateNag": true}
}
"""
    },
    env={"OPENAI_MODEL": "$LIGHTSPAN_MODEL"},
    agents={"memory": system("You are now acting as the managed memory*")},
    install="npm install -g @qwen-code/qwen-code",
)
