package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/coder/websocket"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/stockade-run/stockade/internal/server"
)

// scriptDaemon is a daemon of coding-relay-v1 that runs nothing. What it does with
// a job is said by its mode:
//
//	echo      says the payload back and finishes
//	fail      says that it failed and finishes
//	polite    says something and runs until it is cancelled, then finishes
//	stubborn  the same, and never answers a cancel
type scriptDaemon struct {
	ws     *websocket.Conn
	cancel context.CancelFunc
	done   chan struct{}
}

type daemonsKey struct{}

// daemonCmd starts or stops a daemon:
//
//	daemon start NAME MODE DIR   DIR is the state directory of the relay
//	daemon stop NAME
func daemonCmd(ts *testscript.TestScript, neg bool, args []string) {
	daemons := ts.Value(daemonsKey{}).(map[string]*scriptDaemon)
	switch {
	case len(args) >= 4 && args[0] == "start":
		d, err := startDaemon(args[1], args[2], ts.MkAbs(args[3]), ts.ReadFile("relay.token"))
		if neg {
			if err == nil {
				ts.Fatalf("daemon %s was let in", args[1])
			}
			return
		}
		ts.Check(err)
		daemons[args[1]] = d
	case len(args) == 2 && args[0] == "stop" && daemons[args[1]] != nil && !neg:
		daemons[args[1]].stop()
		delete(daemons, args[1])
	default:
		ts.Fatalf("usage: daemon start NAME MODE DIR | daemon stop NAME")
	}
}

func startDaemon(id, mode, dir, token string) (*scriptDaemon, error) {
	url, err := os.ReadFile(filepath.Join(dir, server.RelayAddressFile))
	if err != nil {
		return nil, err
	}
	hello, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ws, _, err := websocket.Dial(hello, strings.TrimSpace(string(url)), nil)
	if err != nil {
		return nil, err
	}
	d := &scriptDaemon{ws: ws, done: make(chan struct{})}
	ws.SetReadLimit(64 << 20)
	d.send(map[string]any{"type": "daemon.hello", "daemon_id": id, "protocol": "coding-relay-v1", "token": strings.TrimSpace(token), "metadata": map[string]any{"pid": 1}})
	if _, b, err := ws.Read(hello); err != nil || !strings.Contains(string(b), "daemon.ready") {
		ws.CloseNow()
		return nil, fmt.Errorf("no ready: %s: %w", b, err)
	}
	var ctx context.Context
	ctx, d.cancel = context.WithCancel(context.Background())
	go d.serve(ctx, mode)
	return d, nil
}

func (d *scriptDaemon) send(v any) {
	b, _ := json.Marshal(v)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_ = d.ws.Write(ctx, websocket.MessageText, b) // the reader sees that the connection is gone
}

func (d *scriptDaemon) serve(ctx context.Context, mode string) {
	defer close(d.done)
	defer d.ws.CloseNow()
	for {
		_, b, err := d.ws.Read(ctx)
		if err != nil {
			return
		}
		var f struct {
			Type    string          `json:"type"`
			JobID   string          `json:"job_id"`
			Payload json.RawMessage `json:"payload"`
		}
		if json.Unmarshal(b, &f) != nil {
			return
		}
		event := func(e any) { d.send(map[string]any{"type": "run.event", "job_id": f.JobID, "event": e}) }
		finish := func() { d.send(map[string]any{"type": "run.finished", "job_id": f.JobID}) }
		text := func(s string) map[string]any {
			return map[string]any{"type": "message.delta", "data": map[string]any{"chunk": map[string]any{"role": "assistant", "content": s}}}
		}
		switch {
		case f.Type == "run.start" && mode == "echo":
			event(text("you said: "))
			event(text(string(f.Payload)))
			event(map[string]any{"type": "run.completed", "data": map[string]any{"finish_reason": "stop"}})
			finish()
		case f.Type == "run.start" && mode == "fail":
			event(map[string]any{"type": "run.failed", "data": map[string]any{"error": "no such agent\x1b[2J", "code": "claude_code.command_not_found"}})
			finish()
		case f.Type == "run.start":
			event(text("working"))
		case f.Type == "run.cancel" && mode != "stubborn":
			finish()
		}
	}
}

func (d *scriptDaemon) stop() {
	d.cancel()
	<-d.done
}
