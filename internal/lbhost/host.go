package lbhost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// Config says which LangBot this is. The zero value is usable but for Dir.
type Config struct {
	Identity  pluginwire.RuntimeIdentity // "" fields: "instance-1", "instance-1:plugin-runtime"
	Policy    *pluginwire.WorkerPolicy   // nil: DefaultPolicy
	Profile   pluginwire.Profile         // "": oss_dev
	CloudURL  string
	Dir       string  // where pushed files are kept; required
	Script    *Script // nil: an empty one
	Token     string  // control token of a WebSocket
	Logger    *slog.Logger
	PingEvery time.Duration // see rpc.Config
}

// DefaultPolicy allows what tests need on a small machine.
func DefaultPolicy() pluginwire.WorkerPolicy {
	return pluginwire.WorkerPolicy{
		MaxCPUs: 1, MaxMemoryMB: 512, MaxPids: 128, MaxOpenFiles: 256, MaxFileSizeMB: 32, MaxWorkers: 64, MaxTotalCPUs: 64,
		MaxTotalMemoryMB: 64 << 10, MaxInstallations: 10000, MaxPendingRegistrations: 1024, MaxConcurrentRestarts: 2,
		RestartFailureThreshold: 8, RestartFailureWindow: 30, RestartCircuitOpen: 60,
	}
}

// Host is one connection of LangBot to a runtime. It is safe for concurrent use.
type Host struct {
	cfg    Config
	Conn   *rpc.Conn
	Script *Script
	files  *transfer.Store
	held   *transfer.Holder
	cancel context.CancelFunc
	ran    chan error
	child  *child
	once   sync.Once
}

// headerToken carries the control token.
const headerToken = "X-LangBot-Plugin-Runtime-Token"

// Dial connects over a WebSocket, without a handshake.
func Dial(ctx context.Context, url string, cfg Config) (*Host, error) {
	header := http.Header{}
	if cfg.Token != "" {
		header.Set(headerToken, cfg.Token)
	}
	c, resp, err := websocket.Dial(ctx, url, &websocket.DialOptions{
		HTTPHeader: header, CompressionMode: websocket.CompressionDisabled,
		HTTPClient: &http.Client{Transport: wholeFrames{http.DefaultTransport}},
	})
	if err != nil {
		if resp != nil {
			return nil, &DialError{Status: resp.StatusCode, err: err}
		}
		return nil, &DialError{err: err}
	}
	return Over(rpc.WebSocket(c), cfg)
}

// DialError is a connection that was refused.
type DialError struct {
	Status int // of the answer; 0 if there was none
	err    error
}

// Error says what was refused.
func (e *DialError) Error() string {
	return fmt.Sprintf("the runtime refused the connection (%d): %v", e.Status, e.err)
}

// Unwrap returns the cause.
func (e *DialError) Unwrap() error { return e.err }

// Over uses a connection that is there.
func Over(t rpc.Transport, cfg Config) (*Host, error) {
	if cfg.Identity == (pluginwire.RuntimeIdentity{}) {
		cfg.Identity = pluginwire.RuntimeIdentity{InstanceUUID: "instance-1", RuntimeID: "instance-1:plugin-runtime"}
	}
	if cfg.Profile == "" {
		cfg.Profile = pluginwire.ProfileOSS
	}
	if cfg.Policy == nil {
		p := DefaultPolicy()
		cfg.Policy = &p
	}
	if cfg.Script == nil {
		cfg.Script = NewScript()
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(cfg.Dir, "host-")
	if err != nil {
		return nil, err
	}
	files, err := transfer.Open(transfer.Config{Dir: dir, Logger: cfg.Logger})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	h := &Host{cfg: cfg, Script: cfg.Script, files: files, held: files.Holder(nil), cancel: cancel, ran: make(chan error, 1)}
	h.Conn = rpc.New(t, rpc.Config{Name: "langbot", Handle: h.handle, PingEvery: cfg.PingEvery, Logger: cfg.Logger})
	go func() { h.ran <- h.Conn.Run(ctx) }()
	return h, nil
}

// child is a runtime that was started as LangBot starts one.
type child struct{ cmd *exec.Cmd }

// Start runs a runtime as a child that speaks over standard input and output, as
// LangBot does without Docker. The command's Stdin and Stdout must be free.
func Start(cmd *exec.Cmd, cfg Config) (*Host, error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	h, err := Over(rpc.Stdio(out, in, func() error { return errors.Join(in.Close(), out.Close()) }), cfg)
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, err
	}
	h.child = &child{cmd}
	return h, nil
}

// Close ends the connection, and the child if Start made one, and waits for both.
func (h *Host) Close() error {
	var err error
	h.once.Do(func() {
		h.Conn.Close(nil)
		err = <-h.ran
		h.cancel()
		h.held.Close()
		err = errors.Join(err, h.files.Close())
		if h.child != nil {
			err = errors.Join(err, h.child.cmd.Wait())
		}
	})
	return err
}

// Gone is closed when the runtime has ended the connection.
func (h *Host) Gone() <-chan struct{} { return h.Conn.Done() }

// Call asks the runtime under a context; the zero context is none.
func (h *Host) Call(ctx context.Context, action string, data any, on pluginwire.Context) (json.RawMessage, error) {
	return h.Conn.Call(ctx, action, data, rpc.CallOptions{Context: on, Timeout: timeout(action)})
}

// Frames asks for a stream and returns all its frames, and the error that ended it.
func (h *Host) Frames(ctx context.Context, action string, data any, on pluginwire.Context) ([]json.RawMessage, error) {
	s, err := h.Stream(ctx, action, data, on)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var out []json.RawMessage
	for {
		f, err := s.Next(ctx)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		out = append(out, f)
	}
}

// Stream asks for a stream.
func (h *Host) Stream(ctx context.Context, action string, data any, on pluginwire.Context) (*rpc.Stream, error) {
	return h.Conn.Stream(ctx, action, data, rpc.CallOptions{Context: on, Timeout: timeout(action)})
}

// timeout is how long LangBot 4.11 waits.
func timeout(action string) time.Duration {
	seconds := 15
	switch action {
	case pluginwire.ActionPing, pluginwire.ActionSetRuntimeConfig, pluginwire.ActionListPlugins, pluginwire.ActionGetPluginInfo,
		pluginwire.ActionListCommands, pluginwire.ActionGetDebugInfo, pluginwire.ActionGetRAGCreationSettings,
		pluginwire.ActionGetRAGRetrievalSettings:
		seconds = 10
	case pluginwire.ActionListTools, pluginwire.ActionListRunners, pluginwire.ActionGetPluginReadme, pluginwire.ActionGetPluginLogs,
		pluginwire.ActionGetPluginAssetsFile:
		seconds = 20
	case pluginwire.ActionPageAPI, pluginwire.ActionRAGDeleteDocument, pluginwire.ActionRAGOnKBCreate, pluginwire.ActionRAGOnKBDelete:
		seconds = 30
	case pluginwire.ActionListKnowledgeEngines, pluginwire.ActionListParsers, pluginwire.ActionGetStorageAnalysis:
		seconds = 60
	case pluginwire.ActionRemovePluginInstallation:
		seconds = 120
	case pluginwire.ActionEmitEvent, pluginwire.ActionCallTool, pluginwire.ActionExecuteCommand, pluginwire.ActionRetrieveKnowledge:
		seconds = 180
	case pluginwire.ActionReconcilePluginInstallations, pluginwire.ActionParseDocument, pluginwire.ActionRunRunner:
		seconds = 300
	case pluginwire.ActionApplyPluginInstallation, pluginwire.ActionInstallPlugin, pluginwire.ActionUpgradePlugin:
		seconds = 600
	case pluginwire.ActionRAGIngestDocument:
		seconds = 1200
	}
	return time.Duration(seconds) * time.Second
}
