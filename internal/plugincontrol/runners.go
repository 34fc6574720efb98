package plugincontrol

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/runprocess"
)

// Codes of a run that failed before or outside its runner; LangBot shows them and
// retries those that are retryable.
const (
	codePluginNotFound       = "runner.plugin_not_found"
	codePluginDisabled       = "runner.plugin_disabled"
	codePluginNotInitialized = "runner.plugin_not_initialized"
	codeRunnerNotFound       = "runner.not_found"
	codeHandlerNotFound      = "runner.handler_not_found"
	codeTimeout              = "runner.timeout"
	codeForwardException     = "runner.forward_exception"
)

// runnerKind is the kind of component of today's runners, agentRunnerKind of the
// 4.11 development line's.
const (
	runnerKind      = "Runner"
	agentRunnerKind = "AgentRunner"
)

// Words a runner's manifest may use, from the published SDK 0.7: LangBot refuses
// the whole list for one that it does not know.
var (
	runnerUsages       = []string{"agent", "event"}
	runnerCapabilities = []string{"streaming", "tool_calling", "knowledge_retrieval", "multimodal_input",
		"skill_authoring", "interrupt", "steering", "interactions"}
	runnerPermissions = map[string][]string{
		"models": {"invoke", "stream", "rerank", "count_tokens"}, "tools": {"detail", "call"},
		"knowledge_bases": {"list", "retrieve"}, "history": {"page", "search"}, "events": {"get", "page"},
		"storage": {"plugin", "workspace"}, "interactions": {"request"},
	}
)

// describeRunner builds LangBot's description of a runner from its manifest, and
// refuses a manifest that LangBot would not take.
func describeRunner(p Plugin, comp pluginhost.Component) (json.RawMessage, error) {
	meta := object{comp.Metadata}
	spec, err := readObject(comp.Spec, "spec")
	if err != nil {
		return nil, err
	}
	usages := []string{"agent"}
	if comp.Kind == runnerKind {
		if usages, err = words(spec, "usages"); err != nil {
			return nil, err
		}
		if len(usages) == 0 {
			return nil, errdefs.New(errdefs.Invalid, "spec.usages names no usage")
		}
	}
	for _, u := range usages {
		if !slices.Contains(runnerUsages, u) {
			return nil, errdefs.New(errdefs.Invalid, "spec.usages has %q", u)
		}
	}
	events, err := words(spec, "events")
	if err != nil {
		return nil, err
	}
	if len(events) == 0 {
		if comp.Kind == runnerKind && slices.Contains(usages, "event") {
			return nil, errdefs.New(errdefs.Invalid, "spec.events is missing for the usage event")
		}
		events = []string{"*"}
	}
	capabilities, err := capabilitiesOf(spec)
	if err != nil {
		return nil, err
	}
	permissions, err := permissionsOf(spec)
	if err != nil {
		return nil, err
	}
	config := spec.or("config", spec.or("config_schema", list))
	if items := []map[string]json.RawMessage(nil); json.Unmarshal(config, &items) != nil {
		return nil, errdefs.New(errdefs.Invalid, "spec.config is not a list of fields")
	}
	author, name, runner := quote(p.Author()), quote(p.Name()), quote(comp.Name)
	description := meta.or("description", null)
	able, may := encode(capabilities), encode(permissions)
	manifest := build(
		field("id", quote("plugin:"+id(p)+"/"+comp.Name)), field("name", runner),
		field("label", meta.or("label", build(field("en_US", runner)))), field("description", description),
		field("component_kind", quote(comp.Kind)), field("usages", encode(usages)), field("supported_event_patterns", encode(events)),
		field("capabilities", able), field("permissions", may), field("config_schema", config),
		field("metadata", build(field("plugin_author", author), field("plugin_name", name), field("runner_name", runner))),
	)
	version := object{p.Container().Manifest.Metadata}.or("version", null)
	return build(
		field("plugin_author", author), field("plugin_name", name), field("plugin_version", version), field("runner_name", runner),
		field("runner_description", description), field("manifest", manifest),
		field("capabilities", able), field("permissions", may), field("config", config),
	), nil
}

func words(o object, key string) ([]string, error) {
	if !o.has(key) {
		return nil, nil
	}
	var out []string
	if json.Unmarshal(o.get(key), &out) != nil {
		return nil, errdefs.New(errdefs.Invalid, "%s is not a list of words", key)
	}
	return out, nil
}

func capabilitiesOf(spec object) (map[string]bool, error) {
	out := map[string]bool{}
	for _, c := range runnerCapabilities {
		out[c] = false
	}
	if !spec.has("capabilities") {
		return out, nil
	}
	var given map[string]bool
	if json.Unmarshal(spec.get("capabilities"), &given) != nil {
		return nil, errdefs.New(errdefs.Invalid, "spec.capabilities is not an object of true and false")
	}
	for key, on := range given {
		if _, ok := out[key]; !ok {
			return nil, errdefs.New(errdefs.Invalid, "spec.capabilities has %q", key)
		}
		out[key] = on
	}
	return out, nil
}

func permissionsOf(spec object) (map[string][]string, error) {
	out := map[string][]string{}
	for key := range runnerPermissions {
		out[key] = []string{}
	}
	if !spec.has("permissions") {
		return out, nil
	}
	var given map[string][]string
	if json.Unmarshal(spec.get("permissions"), &given) != nil {
		return nil, errdefs.New(errdefs.Invalid, "spec.permissions is not an object of lists of words")
	}
	for key, asked := range given {
		allowed, ok := runnerPermissions[key]
		if !ok {
			return nil, errdefs.New(errdefs.Invalid, "spec.permissions has %q", key)
		}
		for _, a := range asked {
			if !slices.Contains(allowed, a) {
				return nil, errdefs.New(errdefs.Invalid, "spec.permissions.%s has %q", key, a)
			}
		}
		if asked != nil {
			out[key] = asked
		}
	}
	return out, nil
}

// run is one run of a runner: what is sent on, and in which order.
type run struct {
	in        *rpc.Inbound
	action    string // of the worker
	id        json.RawMessage
	sequence  int
	deadline  time.Time
	processes *runprocess.Run // nil: not granted
	waited    bool            // for the proof that they are gone
	over      bool            // its last result was sent
}

// runRunner runs a runner and passes its results on, numbered anew from one. What
// goes wrong with the run is its last result, and no error of the action: LangBot
// keeps results with the run.
func runRunner(kind, action string) handler {
	return func(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
		o, author, name, err := about(in)
		if err != nil {
			return nil, err
		}
		runner, err := o.text("runner_name")
		if err != nil {
			return nil, err
		}
		runCtx, err := o.object("context")
		if err != nil {
			return nil, err
		}
		if got := componentKind(runCtx, kind); got != kind {
			return nil, errdefs.New(errdefs.Invalid, "component kind %q cannot be run", got).WithNext("it must be %s", kind)
		}
		in.BeginStream()
		r := &run{in: in, action: action, id: runCtx.or("run_id", null)}
		p, ok := s.control.find(in.Context, author, name)
		if !ok {
			return nil, r.fail(ctx, codePluginNotFound, false, "Plugin "+author+"/"+name+" not found")
		}
		switch c := p.Container(); {
		case !c.Enabled:
			return nil, r.fail(ctx, codePluginDisabled, false, "Plugin "+id(p)+" is disabled")
		case !p.Ready():
			return nil, r.fail(ctx, codePluginNotInitialized, false, "Plugin "+id(p)+" is not initialized")
		default:
			if _, ok := c.Named(kind, runner); !ok {
				return nil, r.fail(ctx, codeRunnerNotFound, false, "Runner "+runner+" not found in plugin "+id(p))
			}
		}
		r.deadline = deadline(runCtx, time.Now())
		r.processes = s.control.cfg.Processes.Begin(startOf(p, runCtx, r.deadline))
		// However the stream ends, so does the right; see send for the orderly end.
		defer r.processes.End(ctx, "its run was ended by LangBot or with its worker", 0)
		if runCtx, err = tellProcesses(runCtx, r.processes != nil); err != nil {
			return nil, err
		}
		ask := build(field("runner_name", quote(runner)), field("context", runCtx.raw))
		return nil, r.follow(ctx, p, ask)
	}
}

// componentKind is the kind of component a run is meant for.
func componentKind(runCtx object, def string) string {
	return runCtx.within("runtime").within("metadata").textOr("component_kind", def)
}

// deadline is when a run has to be over; zero if it has none, or none that makes sense.
// LangBot says it by the wall clock; from now on it is so far away, wherever that
// clock jumps.
func deadline(runCtx object, now time.Time) time.Time {
	runtime := runCtx.within("runtime")
	var at float64
	if !runtime.has("deadline_at") || json.Unmarshal(runtime.get("deadline_at"), &at) != nil || math.IsNaN(at) || at < 0 || at > 1<<40 {
		return time.Time{}
	}
	return now.Add(time.UnixMicro(int64(at * 1e6)).Sub(now))
}

// Times of a run without a deadline, per frame, and of one whose deadline is over.
const (
	runFrameTimeout = 300 * time.Second
	runGrace        = time.Second
	runExpired      = time.Millisecond
)

// frameTimeout is how long the next result may take: a second more than the
// deadline allows, so that the worker's own time-out is heard first.
func frameTimeout(deadline, now time.Time) time.Duration {
	if deadline.IsZero() {
		return runFrameTimeout
	}
	left := deadline.Sub(now)
	if left <= 0 {
		return runExpired
	}
	return left + runGrace
}

func (r *run) follow(ctx context.Context, p Plugin, ask json.RawMessage) error {
	until := ctx
	if !r.deadline.IsZero() {
		var cancel context.CancelFunc
		until, cancel = context.WithTimeout(ctx, frameTimeout(r.deadline, time.Now()))
		defer cancel()
	}
	stream, err := p.Stream(until, r.action, ask, frameTimeout(r.deadline, time.Now()))
	if err != nil {
		return r.failed(ctx, until, err)
	}
	defer stream.Close()
	for {
		raw, err := stream.Next(until)
		if errors.Is(err, io.EOF) {
			r.endProcesses(ctx, "its run ended")
			return nil
		}
		if r.over {
			if err != nil {
				return nil // LangBot has the last result; how the stream ends adds nothing
			}
			continue // and nothing comes after it
		}
		if err != nil {
			return r.failed(ctx, until, err)
		}
		result, err := readObject(raw, "the runner's result")
		if err != nil {
			return r.failed(ctx, until, err)
		}
		if err := r.send(ctx, result); errdefs.Is(err, errdefs.Exhausted) {
			return r.failed(ctx, until, err) // larger than LangBot takes: that is the run's end
		} else if err != nil {
			return err
		}
	}
}

// send passes a result on. Before the last one the run's processes are ended, so that
// LangBot hears of the end when it is one.
func (r *run) send(ctx context.Context, result object) error {
	switch result.textOr("type", "") {
	case "run.completed":
		r.over = true
		r.endProcesses(ctx, "its run was completed")
	case "run.failed":
		r.over = true
		r.endProcesses(ctx, "its run failed")
	}
	result, err := result.with(field("sequence", encode(r.sequence+1)))
	if err != nil {
		return err
	}
	if err := r.in.Send(ctx, result.raw); err != nil {
		return err
	}
	r.sequence++
	return nil
}

// failed ends the run for what went wrong on the way to its plugin.
func (r *run) failed(ctx, until context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx) // LangBot cancelled the run, or went away
	}
	text := textOf(err)
	if isPeerError(err) && strings.HasSuffix(text, "Action "+r.action+" not found") {
		return r.fail(ctx, codeHandlerNotFound, false, text)
	}
	if until.Err() != nil || errors.Is(err, rpc.ErrTimeout) {
		return r.fail(ctx, codeTimeout, true, "the runner gave no result in time")
	}
	return r.fail(ctx, codeForwardException, false, text)
}

func (r *run) fail(ctx context.Context, code string, retryable bool, text string) error {
	return r.send(ctx, object{build(
		field("run_id", r.id), field("type", quote("run.failed")),
		field("data", build(field("error", quote(pluginwire.CutText(text))), field("code", quote(code)), field("retryable", encode(retryable)))),
		field("usage", null), field("timestamp", null),
	)})
}
