package httpapi

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// waiting is a rig whose logs say one thing and then wait.
func waiting(t *testing.T, recheck time.Duration) *rig {
	r := newRig(t)
	r.h.recheck = recheck
	r.stream = func(ctx context.Context, _ StreamQuery) (LogStream, error) {
		return r.newStream(ctx, [][]byte{frame(wire.KindStdout, 0, "out")}, nil), nil
	}
	return r
}

// follow begins to follow a log and has read what is there.
func (r *rig) follow(key string) *http.Response {
	r.t.Helper()
	req, _ := http.NewRequestWithContext(r.t.Context(), "GET", r.server.URL+logPath+"?follow=true", nil)
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Accept", wire.FramesType)
	resp, err := r.server.Client().Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { resp.Body.Close() })
	if _, err := io.ReadFull(resp.Body, make([]byte, wire.HeaderSize+3)); err != nil {
		r.t.Fatal(err)
	}
	return resp
}

// ended reads a socket to its end and returns the code it was closed with.
func ended(t *testing.T, c *websocket.Conn) websocket.StatusCode {
	t.Helper()
	for {
		typ, b, err := c.Read(t.Context())
		if err != nil {
			return websocket.CloseStatus(err)
		}
		var v api.AttachReply
		if typ == websocket.MessageText && (json.Unmarshal(b, &v) != nil || v.Problem == nil || v.Problem.Code != errdefs.Unauthenticated) {
			t.Errorf("the socket got %s", b)
		}
	}
}

// A revoked key ends what goes on with it, and nothing else.
func TestARevokedKeyEndsWhatGoesOn(t *testing.T) {
	t.Parallel()
	r := waiting(t, 5*time.Millisecond)
	mine, other := r.follow("workspace"), r.dialAs("run", "")
	socket := r.dialAs("workspace", "")
	r.keys.revoked.Store(true)
	rest, err := io.ReadAll(mine.Body)
	if err != nil {
		t.Fatal(err)
	}
	if _, st := frames(t, rest); st == nil || st.Error == nil || st.Error.Code != errdefs.Unauthenticated {
		t.Errorf("the follower got %+v", st)
	}
	if code := ended(t, socket); code != closeProblem+401 {
		t.Errorf("the socket was closed with %d", code)
	}
	if err := other.Write(t.Context(), websocket.MessageBinary, []byte("\x05SIGHUP")); err != nil {
		t.Fatal(err)
	}
	for !slices.Contains(r.broker.noted(), "signal SIGHUP") {
		if t.Context().Err() != nil {
			t.Fatalf("the run's socket does not go on: %v", r.broker.noted())
		}
		time.Sleep(time.Millisecond)
	}
}

// Nothing that comes over an open socket is obeyed after its key was revoked,
// long before anybody looks by himself.
func TestARevokedKeyIsNotObeyed(t *testing.T) {
	t.Parallel()
	r := waiting(t, time.Hour)
	socket := r.dialAs("workspace", "")
	r.keys.revoked.Store(true)
	for range 3 {
		_ = socket.Write(t.Context(), websocket.MessageBinary, []byte("\x05SIGHUP")) // it may be closed by then
	}
	if code := ended(t, socket); code != closeProblem+401 {
		t.Errorf("the socket was closed with %d", code)
	}
	if calls := r.broker.noted(); slices.Contains(calls, "signal SIGHUP") {
		t.Errorf("the broker was asked: %v", calls)
	}
}
