package demo

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"

	acp "github.com/coder/acp-go-sdk"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Events are what the story wants to know of an agent, whatever it speaks.
type events struct {
	say *teller
	// acted is called each time a tool call has ended, with how many have.
	acted func(n int)
	// spoke is called for each piece of what the agent says.
	spoke func()

	mu    sync.Mutex
	ended int
}

func (e *events) words(thought bool, text string) {
	e.say.words(thought, text)
	if !thought {
		e.spoke()
	}
}

func (e *events) did(title, result string) {
	e.say.did(title, result)
	e.mu.Lock()
	e.ended++
	n := e.ended
	e.mu.Unlock()
	e.acted(n)
}

// driveACP works one prompt with an agent that speaks the Agent Client Protocol
// on in and out, and ends its input.
func driveACP(ctx context.Context, in io.WriteCloser, out io.Reader, prompt string, ev *events) error {
	gate := newGate(out)
	peer := &acpPeer{ev: ev, gate: gate, titles: map[acp.ToolCallId]string{}}
	c := connect(peer, in, gate)
	err := func() error {
		init, err := c.Initialize(ctx, acp.InitializeRequest{ProtocolVersion: acp.ProtocolVersionNumber,
			ClientInfo: &acp.Implementation{Name: "stockade-demo", Version: "1"}})
		if err != nil {
			return fmt.Errorf("initialize: %w", err)
		}
		if init.ProtocolVersion != acp.ProtocolVersionNumber {
			return fmt.Errorf("the agent speaks version %d of the protocol, not %d", init.ProtocolVersion, acp.ProtocolVersionNumber)
		}
		session, err := c.NewSession(ctx, acp.NewSessionRequest{Cwd: workspace, McpServers: []acp.McpServer{}})
		if err != nil {
			return fmt.Errorf("a new session: %w", err)
		}
		res, err := c.Prompt(ctx, acp.PromptRequest{SessionId: session.SessionId, Prompt: []acp.ContentBlock{acp.TextBlock(prompt)}})
		if err != nil {
			return fmt.Errorf("the prompt: %w", err)
		}
		if res.StopReason != acp.StopReasonEndTurn {
			return fmt.Errorf("the agent stopped with %q", res.StopReason)
		}
		return nil
	}()
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "the conversation with the agent failed: %v", err)
	}
	if err := in.Close(); err != nil {
		return err
	}
	select { // the agent ends with its input, and its output with it
	case <-c.Done():
		return nil
	case <-ctx.Done():
		return errdefs.Wrap(context.Cause(ctx), errdefs.Unavailable, "the agent did not end")
	}
}

// connect makes the connection; nothing is read before it is set up, which the
// SDK does not see to itself.
func connect(peer *acpPeer, in io.Writer, g *gate) *acp.ClientSideConnection {
	c := acp.NewClientSideConnection(peer, in, g)
	c.SetLogger(slog.New(slog.DiscardHandler))
	close(g.begin)
	return c
}

// acpPeer is the client's half of the protocol.
type acpPeer struct {
	acp.Client // the agent is told that nothing else is offered
	ev         *events
	gate       *gate

	mu     sync.Mutex
	titles map[acp.ToolCallId]string
}

func (p *acpPeer) SessionUpdate(_ context.Context, n acp.SessionNotification) error {
	defer p.gate.release()
	u := n.Update
	switch {
	case u.AgentThoughtChunk != nil:
		p.ev.words(true, textOf(u.AgentThoughtChunk.Content))
	case u.AgentMessageChunk != nil:
		p.ev.words(false, textOf(u.AgentMessageChunk.Content))
	case u.ToolCall != nil:
		p.mu.Lock()
		p.titles[u.ToolCall.ToolCallId] = u.ToolCall.Title
		p.mu.Unlock()
	case u.ToolCallUpdate != nil && u.ToolCallUpdate.Status != nil:
		p.mu.Lock()
		title := p.titles[u.ToolCallUpdate.ToolCallId]
		p.mu.Unlock()
		var result string
		for _, c := range u.ToolCallUpdate.Content {
			if c.Content != nil {
				result += textOf(c.Content.Content)
			}
		}
		p.ev.did(title, result)
	}
	return nil
}

// RequestPermission allows what is asked: the box is what bounds the agent.
func (p *acpPeer) RequestPermission(_ context.Context, r acp.RequestPermissionRequest) (acp.RequestPermissionResponse, error) {
	p.gate.wait(0) // requests overtake notifications; what was said before comes first
	for _, o := range r.Options {
		if o.Kind == acp.PermissionOptionKindAllowOnce {
			if r.ToolCall.Title != nil {
				p.ev.say.note("│ it asks: may I? %s – allowed", clean(*r.ToolCall.Title))
			}
			return acp.RequestPermissionResponse{Outcome: acp.NewRequestPermissionOutcomeSelected(o.OptionId)}, nil
		}
	}
	return acp.RequestPermissionResponse{Outcome: acp.NewRequestPermissionOutcomeCancelled()}, nil
}

func textOf(b acp.ContentBlock) string {
	if b.Text == nil {
		return ""
	}
	return b.Text.Text
}

// gateNotifications is how many notifications may be under way; the SDK breaks
// the connection at 1024.
const gateNotifications = 256

// gate passes lines on, but holds back while too many notifications have not been
// handled: what an agent wrote while no server was there comes all at once.
type gate struct {
	src   *bufio.Reader
	begin chan struct{} // closed when reading may begin
	line  []byte
	err   error

	mu   sync.Mutex
	cond sync.Cond // of mu: open has become less
	open int       // notifications given out and not handled
}

func newGate(r io.Reader) *gate {
	g := &gate{src: bufio.NewReaderSize(r, 64<<10), begin: make(chan struct{})}
	g.cond.L = &g.mu
	return g
}

// notification is how a session update is told from everything else. The agent's
// own text cannot hold it: there the quotes are escaped.
var notification = []byte(`"method":"session/update"`)

// Read gives out at most one line.
func (g *gate) Read(p []byte) (int, error) {
	<-g.begin
	if len(g.line) == 0 && g.err == nil {
		g.line, g.err = g.src.ReadBytes('\n')
		if bytes.Contains(g.line, notification) {
			g.wait(gateNotifications - 1)
			g.mu.Lock()
			g.open++
			g.mu.Unlock()
		}
	}
	if len(g.line) == 0 {
		return 0, g.err
	}
	n := copy(p, g.line)
	g.line = g.line[n:]
	return n, nil
}

// release says that one notification was handled.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open--
	g.cond.Broadcast()
}

// wait returns when at most n notifications are not handled.
func (g *gate) wait(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.open > n {
		g.cond.Wait()
	}
}
