package testagent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"

	acp "github.com/coder/acp-go-sdk"
)

// Config is what an agent is made from.
type Config struct {
	// Script is followed at every prompt; nil looks for ScriptFile in the
	// session's working directory and takes DefaultScript if there is none.
	Script *Script
	// In and Out are the client's bytes and ours.
	In  io.Reader
	Out io.Writer
	// Logger gets trouble on the connection; nil discards.
	Logger *slog.Logger
}

// Serve speaks the protocol until In ends or ctx does. A prompt under way is then
// cancelled and what it runs is killed before Serve returns. If ctx ends first,
// the goroutine that reads In lives on until In ends.
func Serve(ctx context.Context, cfg Config) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	a := &agent{cfg: cfg, stop: make(chan struct{}), ready: make(chan struct{}), sessions: map[acp.SessionId]session{}}
	a.conn = acp.NewAgentSideConnection(a, cfg.Out, &held{cfg.In, a.ready})
	a.conn.SetLogger(cfg.Logger)
	close(a.ready)
	var err error
	select {
	case <-a.conn.Done():
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	close(a.stop)
	a.mu.Lock()
	a.stopped = true
	a.mu.Unlock()
	a.prompts.Wait()
	return err
}

// held is a reader that waits until it may begin: the SDK starts to read before
// its connection is set up.
type held struct {
	io.Reader
	begin <-chan struct{}
}

func (h *held) Read(p []byte) (int, error) {
	<-h.begin
	return h.Reader.Read(p)
}

// session is one conversation.
type session struct {
	dir    string
	script Script
}

// agent implements acp.Agent.
type agent struct {
	cfg   Config
	conn  *acp.AgentSideConnection
	ready chan struct{} // closed when conn is set up; nothing is read before
	stop  chan struct{} // closed when Serve ends

	mu       sync.Mutex
	stopped  bool
	sessions map[acp.SessionId]session
	prompts  sync.WaitGroup
}

var _ acp.Agent = (*agent)(nil)

func (a *agent) Initialize(_ context.Context, p acp.InitializeRequest) (acp.InitializeResponse, error) {
	return acp.InitializeResponse{
		ProtocolVersion: min(p.ProtocolVersion, acp.ProtocolVersionNumber),
		AgentInfo:       &acp.Implementation{Name: "testagent", Version: "1"},
	}, nil
}

func (a *agent) Authenticate(context.Context, acp.AuthenticateRequest) (acp.AuthenticateResponse, error) {
	return acp.AuthenticateResponse{}, nil
}

func (a *agent) NewSession(_ context.Context, p acp.NewSessionRequest) (acp.NewSessionResponse, error) {
	s := session{dir: p.Cwd}
	switch {
	case a.cfg.Script != nil:
		s.script = *a.cfg.Script
	default:
		root, err := os.OpenRoot(p.Cwd)
		if err != nil {
			return acp.NewSessionResponse{}, fmt.Errorf("the working directory cannot be used: %w", err)
		}
		defer root.Close()
		b, err := root.ReadFile(ScriptFile)
		if errors.Is(err, os.ErrNotExist) {
			s.script = DefaultScript()
			break
		}
		if err != nil {
			return acp.NewSessionResponse{}, err
		}
		if s.script, err = ParseScript(b); err != nil {
			return acp.NewSessionResponse{}, err
		}
	}
	id := acp.SessionId("session_" + rand.Text())
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sessions[id] = s
	return acp.NewSessionResponse{SessionId: id}, nil
}

func (a *agent) Prompt(ctx context.Context, p acp.PromptRequest) (acp.PromptResponse, error) {
	a.mu.Lock()
	s, ok := a.sessions[p.SessionId]
	if !ok || a.stopped {
		a.mu.Unlock()
		return acp.PromptResponse{}, acp.NewInvalidParams(map[string]any{"error": "there is no such session"})
	}
	a.prompts.Add(1)
	a.mu.Unlock()
	defer a.prompts.Done()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-a.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	t := &turn{conn: a.conn, session: p.SessionId, dir: s.dir, script: s.script}
	err := t.play(ctx)
	switch {
	case ctx.Err() != nil:
		return acp.PromptResponse{StopReason: acp.StopReasonCancelled}, nil
	case err != nil:
		return acp.PromptResponse{}, acp.NewInternalError(map[string]any{"error": err.Error()})
	}
	return acp.PromptResponse{StopReason: acp.StopReasonEndTurn}, nil
}

// Cancel has nothing to do: the connection cancels the context of the prompt.
func (a *agent) Cancel(context.Context, acp.CancelNotification) error { return nil }

func (a *agent) CloseSession(_ context.Context, p acp.CloseSessionRequest) (acp.CloseSessionResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.sessions, p.SessionId)
	return acp.CloseSessionResponse{}, nil
}

func (a *agent) ListSessions(context.Context, acp.ListSessionsRequest) (acp.ListSessionsResponse, error) {
	return acp.ListSessionsResponse{}, acp.NewMethodNotFound(acp.AgentMethodSessionList)
}

func (a *agent) ResumeSession(context.Context, acp.ResumeSessionRequest) (acp.ResumeSessionResponse, error) {
	return acp.ResumeSessionResponse{}, acp.NewMethodNotFound(acp.AgentMethodSessionResume)
}

func (a *agent) SetSessionConfigOption(context.Context, acp.SetSessionConfigOptionRequest) (acp.SetSessionConfigOptionResponse, error) {
	return acp.SetSessionConfigOptionResponse{}, acp.NewMethodNotFound(acp.AgentMethodSessionSetConfigOption)
}

func (a *agent) SetSessionMode(context.Context, acp.SetSessionModeRequest) (acp.SetSessionModeResponse, error) {
	return acp.SetSessionModeResponse{}, acp.NewMethodNotFound(acp.AgentMethodSessionSetMode)
}
