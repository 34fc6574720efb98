package broker

import (
	"maps"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Bounds of the environment. A value may be as long as one string of execve
// (MAX_ARG_STRLEN in execve(2), 32 pages).
const (
	maxEnvName    = 256
	maxEnvValue   = 128 << 10
	maxEnvEntries = 512
)

// baseEnv is all that a process starts from (P9): nothing of it comes from the
// server. PATH is not here: the host knows what its root file system has.
func baseEnv(pty bool) map[string]string {
	env := map[string]string{
		"HOME":              "/home/agent",
		"USER":              "agent",
		"LOGNAME":           "agent",
		"SHELL":             "/bin/sh",
		"LANG":              "C.UTF-8",
		"TMPDIR":            "/tmp",
		"XDG_CACHE_HOME":    "/home/agent/.cache",
		"XDG_CONFIG_HOME":   "/home/agent/.config",
		"XDG_DATA_HOME":     "/home/agent/.local/share",
		"XDG_STATE_HOME":    "/home/agent/.local/state",
		"CODEX_HOME":        "/home/agent/.codex",
		"CLAUDE_CONFIG_DIR": "/home/agent/.claude",
	}
	if pty {
		env["TERM"] = "xterm-256color"
	}
	return env
}

// reservedEnv are names that decide whose files, programs and credentials a
// process uses. They are set for a process or not at all, never by a caller.
var reservedEnv = map[string]bool{
	"HOME": true, "USER": true, "LOGNAME": true, "SHELL": true, "TMPDIR": true,
	"SSH_AUTH_SOCK": true, "SSH_AGENT_PID": true, "DOCKER_HOST": true, "CODEX_HOME": true, "CLAUDE_CONFIG_DIR": true,
	"OPENAI_API_KEY": true, "OPENAI_BASE_URL": true, "OPENAI_API_BASE": true, "CODEX_API_KEY": true,
	"ANTHROPIC_API_KEY": true, "ANTHROPIC_AUTH_TOKEN": true, "ANTHROPIC_BASE_URL": true, "CLAUDE_CODE_OAUTH_TOKEN": true,
	"GEMINI_API_KEY": true, "GOOGLE_API_KEY": true, "AZURE_OPENAI_API_KEY": true,
	"AWS_ACCESS_KEY_ID": true, "AWS_SECRET_ACCESS_KEY": true, "AWS_SESSION_TOKEN": true, "AWS_BEARER_TOKEN_BEDROCK": true,
}

var reservedPrefixes = []string{"XDG_", "LD_", "STOCKADE_"}

// checkEnv refuses overrides that are malformed or reserved, in the order of
// their names so that the same request gets the same answer.
func checkEnv(env map[string]string) error {
	if len(env) > maxEnvEntries {
		return errdefs.New(errdefs.Invalid, "env has %d entries, the limit is %d", len(env), maxEnvEntries).With("limit", decimal(maxEnvEntries))
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if !envName(name) {
			return errdefs.New(errdefs.Invalid, "env has the name %q, which is none", cutTo(name, 64)).
				WithNext("use 1 to %d characters of A-Z a-z 0-9 _, not beginning with a digit", maxEnvName)
		}
		if reserved(name) {
			return errdefs.New(errdefs.Invalid, "env sets %s, which is reserved: it decides whose files or credentials a process uses", name).
				WithNext("leave it out; model access is granted when the run is created").With("name", name)
		}
		value := env[name]
		if len(value) > maxEnvValue {
			return errdefs.New(errdefs.Invalid, "the value of %s in env has %d bytes, the limit is %d", name, len(value), maxEnvValue).With("limit", decimal(maxEnvValue))
		}
		if strings.IndexByte(value, 0) >= 0 {
			return errdefs.New(errdefs.Invalid, "the value of %s in env holds a NUL byte, which no environment can", name)
		}
	}
	return nil
}

func envName(s string) bool {
	if s == "" || len(s) > maxEnvName || s[0] >= '0' && s[0] <= '9' {
		return false
	}
	for _, c := range []byte(s) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_') {
			return false
		}
	}
	return true
}

func reserved(name string) bool {
	if reservedEnv[name] {
		return true
	}
	return slices.ContainsFunc(reservedPrefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// environment is the whole environment of a process, sorted: the base, then the
// caller's overrides, then what leads to the run's models.
func environment(pty bool, overrides, models map[string]string) []string {
	env := baseEnv(pty)
	maps.Copy(env, overrides)
	maps.Copy(env, models)
	list := make([]string, 0, len(env))
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	slices.Sort(list)
	return list
}
