package lbhost

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"sync"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// Asked is one action that the runtime asked of LangBot.
type Asked struct {
	Action  string
	Data    json.RawMessage
	Context pluginwire.Context
}

// Field returns a field of the data.
func (a Asked) Field(name string) any {
	var m M
	_ = json.Unmarshal(a.Data, &m)
	return m[name]
}

// Answer answers one action of a plugin or the runtime. It may stream with in.Send,
// and push files with h.PushBack.
type Answer func(ctx context.Context, h *Host, in *rpc.Inbound) (any, error)

// Settings are LangBot's settings of an installation.
type Settings struct {
	Enabled          bool   `json:"enabled"`
	Priority         int    `json:"priority"`
	Config           M      `json:"plugin_config"`
	InstallSource    string `json:"install_source"`
	InstallInfo      M      `json:"install_info"`
	InstallationUUID any    `json:"installation_uuid"`
	RuntimeRevision  any    `json:"runtime_revision"`
	ArtifactDigest   any    `json:"artifact_digest"`
}

// maxAsked bounds what a Script remembers: the newest.
const maxAsked = 100_000

// Script is what LangBot answers, and what it was asked. It is safe for concurrent use.
type Script struct {
	mu       sync.Mutex
	answers  map[string]Answer
	settings map[string]Settings // by installation, or author/name
	stored   map[string]string   // base64, by owner and key
	files    map[string][]byte   // by storage path
	asked    []Asked
	forget   bool
	changed  chan struct{}
}

// NewScript makes a script with an answer to everything.
func NewScript() *Script {
	return &Script{answers: map[string]Answer{}, settings: map[string]Settings{}, stored: map[string]string{}, files: map[string][]byte{},
		changed: make(chan struct{})}
}

// On sets the answer to an action, in the place of the one that is built in; nil
// brings that back.
func (s *Script) On(action string, a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a == nil {
		delete(s.answers, action)
		return
	}
	s.answers[action] = a
}

// Set makes settings of an installation (or of author/name, for a plugin of
// data/plugins): enabled, with a configuration.
func (s *Script) Set(installation string, config M) {
	s.SetAll(installation, Settings{Enabled: true, Config: config, InstallSource: "local", InstallInfo: M{}})
}

// SetAll makes settings as they are.
func (s *Script) SetAll(installation string, set Settings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settings[installation] = set
}

// File makes a file that plugins can ask for by its storage path.
func (s *Script) File(path string, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files[path] = b
}

// Forget stops remembering, for a benchmark.
func (s *Script) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget, s.asked = true, nil
}

// Asked returns what was asked so far, of one action or, with "", of all.
func (s *Script) Asked(action string) []Asked {
	s.mu.Lock()
	defer s.mu.Unlock()
	if action == "" {
		return slices.Clone(s.asked)
	}
	var out []Asked
	for _, a := range s.asked {
		if a.Action == action {
			out = append(out, a)
		}
	}
	return out
}

// Wait waits until an action was asked n times.
func (s *Script) Wait(ctx context.Context, action string, n int) error {
	for {
		s.mu.Lock()
		changed := s.changed
		s.mu.Unlock()
		if got := len(s.Asked(action)); got >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s was asked %d times, not %d: %w", action, len(s.Asked(action)), n, context.Cause(ctx))
		}
	}
}

func (s *Script) remember(in *rpc.Inbound) Answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.forget && len(s.asked) < maxAsked {
		s.asked = append(s.asked, Asked{in.Action, slices.Clone(in.Data), in.Context})
		close(s.changed)
		s.changed = make(chan struct{})
	}
	return s.answers[in.Action]
}

// handle answers the runtime.
func (h *Host) handle(ctx context.Context, in *rpc.Inbound) (any, error) {
	switch in.Action {
	case pluginwire.ActionPing:
		return M{"pong": "pong"}, nil
	case pluginwire.ActionFileChunk:
		if err := h.held.Chunk(in.Data, in.Context); err != nil {
			return nil, err
		}
		return nil, nil
	}
	if a := h.Script.remember(in); a != nil {
		return a(ctx, h, in)
	}
	return h.Script.builtIn(ctx, h, in)
}

// PushBack sends a file to the runtime under the context of a request.
func (h *Host) PushBack(ctx context.Context, in *rpc.Inbound, data []byte, ext string) (string, error) {
	return transfer.Send(ctx, h.Conn, data, ext, in.Context)
}

// builtIn is LangBot's answer where the test does not care.
func (s *Script) builtIn(ctx context.Context, h *Host, in *rpc.Inbound) (any, error) {
	var data M
	_ = json.Unmarshal(in.Data, &data)
	text := func(key string) string { v, _ := data[key].(string); return v }
	switch in.Action {
	case pluginwire.ActionGetPluginSettings:
		return s.settingsFor(in.Context, text("plugin_author")+"/"+text("plugin_name")), nil
	case pluginwire.ActionSetBinaryStorage, pluginwire.ActionGetBinaryStorage, pluginwire.ActionGetBinaryStorageKeys, pluginwire.ActionDeleteBinaryStorage:
		return s.storage(in.Action, in.Context, text)
	case pluginwire.ActionGetKnowledgeFileStream:
		s.mu.Lock()
		b, ok := s.files[text("storage_path")]
		s.mu.Unlock()
		if !ok {
			return nil, errdefs.New(errdefs.NotFound, "no file %s", text("storage_path"))
		}
		key, err := h.PushBack(ctx, in, b, "bin")
		return M{"file_key": key}, err
	case pluginwire.ActionGetConfigFile:
		s.mu.Lock()
		defer s.mu.Unlock()
		return M{"file_base64": base64.StdEncoding.EncodeToString(s.files[text("file_key")])}, nil
	case pluginwire.ActionInvokeLLMStream:
		for _, w := range []string{"Hello", " from", " LangBot"} {
			if err := in.Send(ctx, M{"chunk": M{"role": "assistant", "content": w}}); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}
	if a, ok := fixed[in.Action]; ok {
		return json.RawMessage(a), nil
	}
	return nil, nil
}

// fixed answers hold what the SDK's proxies read.
var fixed = map[string]string{
	pluginwire.ActionGetLangbotVersion:          `{"version":"4.11.2"}`,
	pluginwire.ActionGetBots:                    `{"bots":["bot-1","bot-2"]}`,
	pluginwire.ActionGetBotInfo:                 `{"bot":{"uuid":"bot-1"}}`,
	pluginwire.ActionGetBotUUID:                 `{"bot_uuid":"bot-1"}`,
	pluginwire.ActionGetQueryVar:                `{"value":null}`,
	pluginwire.ActionGetQueryVars:               `{"vars":{}}`,
	pluginwire.ActionGetLLMModels:               `{"llm_models":["model-1"]}`,
	pluginwire.ActionCountTokens:                `{"tokens":3}`,
	pluginwire.ActionInvokeLLM:                  `{"message":{"role":"assistant","content":"Hello from LangBot"}}`,
	pluginwire.ActionInvokeEmbedding:            `{"vectors":[[0.5,0.25]]}`,
	pluginwire.ActionInvokeRerank:               `{"results":[{"index":0,"relevance_score":1.0}]}`,
	pluginwire.ActionVectorSearch:               `{"results":[]}`,
	pluginwire.ActionVectorDelete:               `{"count":0}`,
	pluginwire.ActionVectorList:                 `{"items":[],"total":0}`,
	pluginwire.ActionListKnowledgeBases:         `{"knowledge_bases":[]}`,
	pluginwire.ActionListPipelineKnowledgeBases: `{"knowledge_bases":[]}`,
	pluginwire.ActionRetrieveKnowledge:          `{"results":[]}`,
	pluginwire.ActionRetrieveKnowledgeBase:      `{"results":[]}`,
	pluginwire.ActionListParsers:                `{"parsers":[]}`,
	pluginwire.ActionInvokeParser:               `{"text":"","sections":[],"metadata":{}}`,
	pluginwire.ActionGetToolDetail:              `{"tool":{"name":"tool-1","description":"","parameters":{}}}`,
	pluginwire.ActionCallTool:                   `{"tool_response":{"answer":42},"result":{"answer":42}}`,
	pluginwire.ActionCallPlatformAPI:            `{"result":{}}`,
	pluginwire.ActionReplyStream:                `{"result":{}}`,
	pluginwire.ActionGetPrompt:                  `{"prompt":[]}`,
	pluginwire.ActionHistoryPage:                `{"items":[],"next_cursor":null,"prev_cursor":null,"has_more":false,"total_count":0}`,
	pluginwire.ActionHistorySearch:              `{"items":[],"total_count":0,"query":""}`,
	pluginwire.ActionEventPage:                  `{"items":[],"next_cursor":null,"prev_cursor":null,"has_more":false,"total_count":0}`,
	pluginwire.ActionSteeringPull:               `{"items":[]}`,
	pluginwire.ActionStateGet:                   `{"value":null}`,
	pluginwire.ActionStateSet:                   `{"success":true}`,
	pluginwire.ActionStateDelete:                `{"success":true}`,
	pluginwire.ActionStateList:                  `{"keys":[],"has_more":false}`,
	pluginwire.ActionGetBoxStatus:               `{"available":true,"enabled":true}`,
	pluginwire.ActionListBoxes:                  `{"items":[]}`,
	pluginwire.ActionAcquireBox:                 `{"id":"box-1","status":"ready"}`,
	pluginwire.ActionBindBox:                    `{"box_id":"box-1","outbox":"/outbox"}`,
	pluginwire.ActionImportBoxAttachments:       `{"items":[]}`,
	pluginwire.ActionExportBoxFiles:             `{"items":[]}`,
}

func (s *Script) settingsFor(on pluginwire.Context, identity string) Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	set, ok := s.settings[on.InstallationUUID]
	if !ok || on.InstallationUUID == "" {
		if set, ok = s.settings[identity]; !ok {
			set = Settings{Enabled: true, Config: M{}, InstallSource: "local", InstallInfo: M{}}
		}
	}
	if set.InstallationUUID == nil {
		switch {
		case on.IsBinding():
			set.InstallationUUID, set.RuntimeRevision, set.ArtifactDigest = on.InstallationUUID, on.RuntimeRevision, on.ArtifactDigest
		default:
			// LangBot's row of a plugin without an artifact has an installation alone.
			set.InstallationUUID = uuid5(on.WorkspaceUUID + ":" + identity)
		}
	}
	return set
}

// storage keeps bytes per owner. As LangBot does, it takes the owner from the
// trusted context and not from what the runtime says.
func (s *Script) storage(action string, on pluginwire.Context, text func(string) string) (any, error) {
	owner := on.WorkspaceUUID + "\x00"
	if text("owner_type") == "plugin" {
		owner += on.InstallationUUID
	}
	owner += "\x00"
	s.mu.Lock()
	defer s.mu.Unlock()
	switch action {
	case pluginwire.ActionSetBinaryStorage:
		s.stored[owner+text("key")] = text("value_base64")
	case pluginwire.ActionDeleteBinaryStorage:
		delete(s.stored, owner+text("key"))
	case pluginwire.ActionGetBinaryStorageKeys:
		keys := []string{}
		for k := range s.stored {
			if len(k) >= len(owner) && k[:len(owner)] == owner {
				keys = append(keys, k[len(owner):])
			}
		}
		slices.Sort(keys)
		return M{"keys": keys}, nil
	default:
		v, ok := s.stored[owner+text("key")]
		if !ok {
			return nil, errdefs.New(errdefs.NotFound, "Storage with key %s not found", text("key"))
		}
		return M{"value_base64": v}, nil
	}
	return nil, nil
}
