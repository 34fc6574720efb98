package cli

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// relayAgents are the agents a payload can be made for here.
var relayAgents = []string{"claude", "codex", "acp"}

// relayPayload makes the payload of an agent's runner: the fields that daemons of
// coding-relay-v1 know, with what a new conversation needs.
func relayPayload(o relayRunOptions, prompt string) (json.RawMessage, error) {
	if !slices.Contains(relayAgents, o.agent) {
		return nil, errdefs.New(errdefs.Invalid, "the agent %q is not known here", o.agent).
			WithNext("choose one of %s, or give a whole payload with --payload", strings.Join(relayAgents, ", "))
	}
	command := func(def string) string {
		if o.command != "" {
			return o.command
		}
		return def
	}
	config := map[string]any{"workspace": o.workspace, "env": map[string]string{}, "streaming": true, "langbot_assets_enabled": false}
	if s := o.timeout.Seconds(); s > 0 {
		config["timeout"] = s
	}
	payload := map[string]any{"kind": o.agent, "config": config}
	switch o.agent {
	case "claude":
		payload["kind"], payload["prompt"], payload["resume"] = "claude-code", prompt, false
		config["command"], config["args"] = command("claude"), []string{}
		config["dangerously_skip_permissions"] = o.allowAll // said, because its absence means yes
	case "codex":
		payload["prompt"] = prompt
		config["command"], config["args"] = command("codex"), []string{}
		config["approval_policy"], config["sandbox_mode"] = "never", "workspace-write"
		if o.allowAll {
			config["sandbox_mode"] = "danger-full-access"
		}
	case "acp":
		payload["prompt_text"], payload["input_text"] = prompt, prompt
		config["acp_command"] = command("codex-acp")
		config["permission_decision"] = "reject_once"
		if o.allowAll {
			config["permission_decision"] = "allow_once"
		}
	}
	return json.Marshal(payload)
}
