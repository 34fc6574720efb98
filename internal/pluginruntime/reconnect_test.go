package pluginruntime

import (
	"context"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// TestSupersession (AP-06, CH-06): a newer connection ends the older one with all it
// has in flight; the workers go on and the newer one calls them.
func TestSupersession(t *testing.T) {
	t.Parallel()
	r := start(t, "0.7", nil)
	kit := install(workspace("ws-1"), "kit-1", "kit")(t)
	script := lbhost.NewScript()
	old := r.connect(lbhost.Config{Script: script}, kit)
	running(t, old, kit)
	pid, err := old.CallTool(t.Context(), kit.Binding, "probe", M{"op": "pid"})
	if err != nil {
		t.Fatal(err)
	}
	// A call of the plugin that LangBot has got and does not answer.
	script.On(pluginwire.ActionGetBots, func(ctx context.Context, _ *lbhost.Host, _ *rpc.Inbound) (any, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	})
	failed := make(chan error, 1)
	go func() {
		_, err := old.CallTool(t.Context(), kit.Binding, "probe", M{"op": "bots"})
		failed <- err
	}()
	if err := script.Wait(t.Context(), pluginwire.ActionGetBots, 1); err != nil {
		t.Fatal(err)
	}
	newer := r.connect(lbhost.Config{Script: script}, kit)
	<-old.Gone()
	if err := <-failed; err == nil {
		t.Error("a call over the older connection was answered")
	}
	if err := old.Ping(t.Context()); err == nil {
		t.Error("the older connection still answers")
	}
	script.On(pluginwire.ActionGetBots, nil)
	if got, err := newer.CallTool(t.Context(), kit.Binding, "probe", M{"op": "bots"}); err != nil || !strings.Contains(string(got), "bot-2") {
		t.Errorf("over the newer connection: %s, %v", got, err)
	}
	if got, err := newer.CallTool(t.Context(), kit.Binding, "probe", M{"op": "pid"}); err != nil || string(got) != string(pid) {
		t.Errorf("the worker is another one: %s, was %s, %v", got, pid, err)
	}
}

// TestReconnectInTheMiddleOfEverything: LangBot comes and goes while calls run; each
// call is answered or fails, and in the end all is as it was.
func TestReconnectInTheMiddleOfEverything(t *testing.T) {
	t.Parallel()
	r := start(t, "0.6", nil)
	kit := install(workspace("ws-1"), "kit-1", "kit")(t)
	script := lbhost.NewScript()
	h := r.connect(lbhost.Config{Script: script}, kit)
	running(t, h, kit)
	for range 5 {
		done := make(chan struct{})
		for range 8 {
			go func() {
				defer func() { done <- struct{}{} }()
				for {
					if _, err := h.CallTool(t.Context(), kit.Binding, "probe", M{"op": "bots"}); err != nil {
						return
					}
				}
			}()
		}
		next := r.dial(lbhost.Config{Script: script})
		for range 8 {
			<-done
		}
		if _, err := next.Handshake(t.Context(), workspace("ws-1"), kit); err != nil {
			t.Fatal(err)
		}
		h = next
	}
	if got, err := h.CallTool(t.Context(), kit.Binding, "probe", M{"op": "bots"}); err != nil || !strings.Contains(string(got), "bot-1") {
		t.Errorf("in the end: %s, %v", got, err)
	}
}
