package plugincontrol

import (
	"context"
	"encoding/json"
	"time"

	"github.com/stockade-run/stockade/internal/runprocess"
)

// startOf is what the owner of processes is told of a run: the binding its worker
// acts under, and what LangBot's context says of it.
func startOf(p Plugin, runCtx object, deadline time.Time) runprocess.Start {
	s := runprocess.Start{
		Plugin: id(p), Binding: p.Binding(), RunID: runCtx.textOr("run_id", ""),
		Conversation: conversation(runCtx), Deadline: deadline,
	}
	if g, ok := p.(interface{ Gone() <-chan struct{} }); ok {
		s.Gone = g.Gone()
	}
	return s
}

// conversation names the conversation of a run, or is empty. Conversations of two
// bots, and two threads of one conversation, are not the same.
func conversation(runCtx object) []string {
	c := runCtx.within("conversation")
	one := c.textOr("conversation_id", runCtx.within("context").textOr("conversation_id", ""))
	if one == "" {
		return nil
	}
	return []string{c.textOr("bot_id", ""), one, c.textOr("thread_id", runCtx.within("context").textOr("thread_id", ""))}
}

// apiRunProcess is the name of the right among the available APIs of a run, and of
// the limits of its calls in the runtime's metadata: the published SDK drops APIs
// that it does not know, but keeps all metadata.
const apiRunProcess = "run_process"

// tellProcesses says in the context of a run whether it may have processes. What is
// not granted is not there, whatever LangBot wrote.
func tellProcesses(runCtx object, granted bool) (object, error) {
	runCtx, err := runCtx.inner("context", func(c object) (object, error) {
		return c.inner("available_apis", func(apis object) (object, error) { return apis.set(apiRunProcess, granted, json.RawMessage("true")) })
	})
	if err != nil {
		return runCtx, err
	}
	return runCtx.inner("runtime", func(c object) (object, error) {
		return c.inner("metadata", func(m object) (object, error) { return m.set(apiRunProcess, granted, encode(runprocess.Limits())) })
	})
}

// set gives a field a value, or takes it away.
func (o object) set(key string, on bool, value json.RawMessage) (object, error) {
	switch {
	case on:
		return o.with(field(key, value))
	case o.get(key) != nil:
		return o.without(key)
	}
	return o, nil
}

// inner changes a field that is an object; where it is missing or null, and the
// change adds something, it becomes one. Any other value is left as it is.
func (o object) inner(key string, change func(object) (object, error)) (object, error) {
	if v := o.get(key); len(v) > 0 && v[0] != '{' && v[0] != 'n' {
		return o, nil
	}
	before := o.within(key)
	after, err := change(before)
	if err != nil || string(after.raw) == string(before.raw) {
		return o, err
	}
	return o.with(field(key, after.raw))
}

// endProcesses ends the run's right to processes and waits for the proof, once.
func (r *run) endProcesses(ctx context.Context, reason string) {
	if r.waited {
		return
	}
	r.waited = true
	r.processes.End(ctx, reason, runprocess.Patience(r.deadline, time.Now()))
}
