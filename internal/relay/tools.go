package relay

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// Tools answers the tool calls of one job.
type Tools interface {
	// Call answers one JSON-RPC message or a batch; nil for a notification. Calls
	// come at the same time from several goroutines. ctx ends when the job's tools
	// are revoked or Limits.MCPTimeout is over; an answer after that is dropped. The
	// text of an error that carries an errdefs code is told to the daemon, that of
	// another is not.
	Call(ctx context.Context, payload json.RawMessage) (json.RawMessage, error)
}

var errRevoked = errors.New("the job's tools are revoked")

// toolbox makes the tool calls of one job, beside the connection's reader.
type toolbox struct {
	job    *Job
	tools  Tools // nil: none
	ctx    context.Context
	cancel context.CancelCauseFunc
	slots  chan struct{} // one per call at once

	mu      sync.Mutex
	revoked bool
	calls   int           // waiting or being made
	bytes   int64         // their payloads
	idle    chan struct{} // made by wait; closed at no calls
}

func newToolbox(j *Job, tools Tools) *toolbox {
	b := &toolbox{job: j, tools: tools, slots: make(chan struct{}, j.hub.lim.MCPCalls)}
	b.ctx, b.cancel = context.WithCancelCause(context.Background())
	return b
}

// revoke ends the rights of the job at once: no call begins after it, the context of
// those that are under way has ended, and no answer of a tool is passed on.
func (b *toolbox) revoke() {
	b.mu.Lock()
	b.revoked = true
	b.mu.Unlock()
	b.cancel(errRevoked)
}

// pass hands a tool's answer to the connection, or says why not. It and revoke do not
// overlap.
func (b *toolbox) pass(f relaywire.Frame) (why string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.revoked:
		return errRevoked.Error()
	case !b.job.link.out.put(f, false):
		return "too many answers wait to be sent: read them first"
	}
	return ""
}

// waiting is how many calls of a job may wait for one slot.
const waiting = 8

// call begins one call; payload is copied. It does not wait.
func (b *toolbox) call(request string, payload json.RawMessage) {
	lim := b.job.hub.lim
	var why string
	b.mu.Lock()
	switch {
	case b.revoked:
		why = errRevoked.Error()
	case b.tools == nil:
		why = "this job was given no tools"
	case b.calls >= waiting*lim.MCPCalls || b.calls > 0 && b.bytes+int64(len(payload)) > lim.MessageBytes:
		why = "too many tool calls at once: wait for answers first"
	}
	if why != "" {
		b.mu.Unlock()
		b.refuse(request, payload, why)
		return
	}
	b.calls++
	b.bytes += int64(len(payload))
	b.mu.Unlock()
	copied := append(json.RawMessage(nil), payload...)
	// Not counted by the hub: a tool that ignores its context cannot be joined, and
	// must not keep the hub from stopping. wait joins those that do not.
	go func() {
		b.answer(request, copied)
		b.mu.Lock()
		b.calls--
		b.bytes -= int64(len(copied))
		if b.calls == 0 && b.idle != nil {
			close(b.idle)
			b.idle = nil
		}
		b.mu.Unlock()
	}()
}

func (b *toolbox) answer(request string, payload json.RawMessage) {
	j := b.job
	select {
	case b.slots <- struct{}{}:
		defer func() { <-b.slots }()
	case <-b.ctx.Done():
	}
	if b.ctx.Err() != nil { // also when there was a slot at the same time
		b.refuse(request, payload, errRevoked.Error())
		return
	}
	ctx, cancel := context.WithTimeout(b.ctx, j.hub.lim.MCPTimeout)
	defer cancel()
	result, err := b.tools.Call(ctx, payload)
	switch {
	case b.ctx.Err() != nil:
		b.refuse(request, payload, errRevoked.Error())
	case ctx.Err() != nil:
		b.refuse(request, payload, "the tool call took longer than "+j.hub.lim.MCPTimeout.String())
	case err != nil:
		// What a caller may read is in errdefs errors only.
		text := "the tool call failed"
		if e, ok := errors.AsType[*errdefs.Error](err); ok {
			text = e.Error()
		}
		j.hub.log.Warn("relay: a tool call failed", "job", j.id, "error", err)
		b.refuse(request, payload, text)
	case int64(len(result)) > j.hub.lim.MessageBytes:
		b.refuse(request, payload, "the tool's answer is larger than "+itoa(int(j.hub.lim.MessageBytes))+" bytes")
	case len(result) > 0 && !json.Valid(result):
		j.hub.log.Error("relay: a tool answered what is not JSON", "job", j.id)
		b.refuse(request, payload, "the tool call failed")
	default:
		f := relaywire.Frame{Type: relaywire.MCPResponse, RequestID: request, JobID: j.id, Payload: result}
		if why := b.pass(f); why != "" {
			b.refuse(request, payload, why)
		}
	}
}

// refuse answers with an error that keeps the ids of the call.
func (b *toolbox) refuse(request string, payload json.RawMessage, why string) {
	f := relaywire.Frame{Type: relaywire.MCPResponse, RequestID: request, JobID: b.job.id,
		Payload: relaywire.RPCError(payload, relaywire.RPCFailed, why)}
	if !b.job.link.out.put(f, false) {
		b.job.hub.log.Warn("relay: a tool answer was dropped: the daemon does not read", "job", b.job.id)
	}
}

// wait waits until no call is under way, at most d; false: one ignores its context.
// Call it after revoke.
func (b *toolbox) wait(d time.Duration) bool {
	b.mu.Lock()
	if b.calls == 0 {
		b.mu.Unlock()
		return true
	}
	idle := make(chan struct{})
	b.idle = idle
	b.mu.Unlock()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-idle:
		return true
	case <-timer.C:
		return false
	}
}
