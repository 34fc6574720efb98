package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// fakeRelay answers with zero values; run, if set, makes the job.
type fakeRelay struct {
	fb  *fakeBroker
	run func(req api.RelayJobRequest) RelayJob
}

func (f *fakeRelay) MaxPayload() int64 { return 1 << 20 }
func (f *fakeRelay) Run(ctx context.Context, _ authz.Principal, req api.RelayJobRequest) (RelayJob, error) {
	if err := f.fb.note(ctx, "relay-run "+req.DaemonID); err != nil {
		return nil, err
	}
	if f.run != nil {
		return f.run(req), nil
	}
	return newFakeJob(), nil
}
func (f *fakeRelay) Cancel(ctx context.Context, _ authz.Principal, id string) (api.RelayOutcome, error) {
	return api.RelayOutcome{Acknowledged: true}, f.fb.note(ctx, "relay-cancel "+id)
}
func (f *fakeRelay) Daemons(ctx context.Context, _ authz.Principal) (api.List[api.RelayDaemon], error) {
	return api.List[api.RelayDaemon]{}, f.fb.note(ctx, "relay-daemons")
}
func (f *fakeRelay) Jobs(ctx context.Context, _ authz.Principal) (api.List[api.RelayJob], error) {
	return api.List[api.RelayJob]{}, f.fb.note(ctx, "relay-jobs")
}
func (f *fakeRelay) Fences(ctx context.Context, _ authz.Principal) (api.List[api.RelayFence], error) {
	return api.List[api.RelayFence]{}, f.fb.note(ctx, "relay-fences")
}
func (f *fakeRelay) Fence(ctx context.Context, _ authz.Principal, id string) (api.RelayFence, error) {
	return api.RelayFence{DaemonID: id, Jobs: []string{}}, f.fb.note(ctx, "relay-fence "+id)
}
func (f *fakeRelay) ClearFence(ctx context.Context, _ authz.Principal, id string, req api.ClearRelayFenceRequest) (api.RelayFence, error) {
	return api.RelayFence{DaemonID: id, Jobs: []string{}}, f.fb.note(ctx, "relay-clear "+id+" "+req.Fence+" "+req.Reason)
}

// fakeJob gives batches; when it has no more it ends, or with endless waits for
// its caller to leave.
type fakeJob struct {
	batches [][]json.RawMessage
	endless bool
	panics  bool
	outcome api.RelayOutcome

	mu     sync.Mutex
	causes []string
	left   chan struct{}
}

func newFakeJob(batches ...[]json.RawMessage) *fakeJob {
	return &fakeJob{batches: batches, left: make(chan struct{}), outcome: api.RelayOutcome{Acknowledged: true}}
}

func (j *fakeJob) Info() api.RelayJob {
	return api.RelayJob{ID: "AAAAAAAAAAAAAAAAAAAAAA", DaemonID: "laptop", State: "running"}
}

func (j *fakeJob) NextBatch(ctx context.Context) ([]json.RawMessage, error) {
	if j.panics {
		panic("the relay fails on purpose")
	}
	if len(j.batches) > 0 {
		b := j.batches[0]
		j.batches = j.batches[1:]
		return b, nil
	}
	if !j.endless {
		return nil, io.EOF
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (j *fakeJob) Leave(_ context.Context, cause string) (api.RelayOutcome, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.causes) == 0 {
		close(j.left)
	}
	j.causes = append(j.causes, cause)
	return j.outcome, nil
}

func (j *fakeJob) firstCause() string {
	<-j.left
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.causes[0]
}

const relayBody = `{"daemon_id":"laptop","payload":{"prompt":"hi"}}`

func lines(t *testing.T, b []byte) []api.RelayLine {
	t.Helper()
	var all []api.RelayLine
	for line := range bytes.Lines(b) {
		var l api.RelayLine
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		all = append(all, l)
	}
	return all
}

func TestARelayJobIsLines(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	odd := "{\n  \"text\": \"a\\nb\\u2028 \\ud800\",\r\n \"n\": 1e400 }" // whitespace, lone surrogate, a number no float holds
	r.relay.run = func(req api.RelayJobRequest) RelayJob {
		if string(req.Payload) != `{ "prompt": "h\u0069" }` {
			t.Errorf("the payload was written anew: %s", req.Payload)
		}
		if req.TimeoutMillis != 5000 || req.WaitMillis != 7 {
			t.Errorf("%+v", req)
		}
		j := newFakeJob([]json.RawMessage{json.RawMessage(`{"a":1}`), json.RawMessage(odd)}, []json.RawMessage{json.RawMessage(`{"b":2}`)})
		j.outcome = api.RelayOutcome{Code: "relay.daemon_timeout", Fence: &api.RelayFence{DaemonID: "laptop", Jobs: []string{"x"}}}
		return j
	}
	body := `{"timeout_ms":5000,"wait_ms":7,"tools":[],"daemon_id":"laptop","payload":{ "prompt": "h\u0069" }}`
	resp, b := r.do("POST", "/v1/relay/jobs", "workspace", strings.NewReader(body), "Content-Type: application/json")
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != linesMedia {
		t.Fatalf("%d %s %s", resp.StatusCode, resp.Header.Get("Content-Type"), b)
	}
	all := lines(t, b)
	if len(all) != 5 || all[0].Type != "started" || all[0].Job.ID == "" || all[4].Type != "outcome" || all[4].Outcome.Fence.DaemonID != "laptop" {
		t.Fatalf("%s", b)
	}
	if got, want := string(all[2].Event), strings.NewReplacer("\n", " ", "\r", " ").Replace(odd); got != want {
		t.Errorf("the event changed:\n%s\n%s", got, want)
	}

	// The same as server-sent events: names, one data line each.
	resp, b = r.do("POST", "/v1/relay/jobs", "workspace", strings.NewReader(body), "Content-Type: application/json", "Accept: text/event-stream")
	if resp.Header.Get("Content-Type") != sseMedia {
		t.Errorf("%q", resp.Header.Get("Content-Type"))
	}
	var names []string
	for block := range strings.SplitSeq(strings.TrimSuffix(string(b), "\n\n"), "\n\n") {
		name, data, ok := strings.Cut(block, "\ndata: ")
		if !ok || strings.Contains(data, "\n") || !jsonValid([]byte(data)) {
			t.Errorf("not an event: %q", block)
		}
		names = append(names, strings.TrimPrefix(name, "event: "))
	}
	if strings.Join(names, " ") != "started event event event outcome" {
		t.Errorf("%v", names)
	}
}

func TestACallerThatLeavesSettlesTheJob(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	job := newFakeJob()
	job.endless = true
	r.relay.run = func(api.RelayJobRequest) RelayJob { return job }
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", r.server.URL+"/v1/relay/jobs", strings.NewReader(relayBody))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer workspace")
	resp, err := r.server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if first, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil || !strings.Contains(first, "started") {
		t.Fatalf("%q %v", first, err)
	}
	leave()
	if cause := job.firstCause(); cause != "the caller left" {
		t.Errorf("left because %q", cause)
	}
}

func TestAShutdownSettlesTheJobAndSaysSo(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	job := newFakeJob([]json.RawMessage{json.RawMessage(`{}`)})
	job.endless = true
	r.relay.run = func(api.RelayJobRequest) RelayJob { return job }
	req, _ := http.NewRequestWithContext(t.Context(), "POST", r.server.URL+"/v1/relay/jobs", strings.NewReader(relayBody))
	req.Header.Set("Authorization", "Bearer workspace")
	resp, err := r.server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	first, _ := in.ReadString('\n')
	if err := r.h.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	all := lines(t, append([]byte(first), rest...))
	if all[len(all)-1].Type != "outcome" || job.firstCause() != "the server is shutting down" {
		t.Errorf("%s%s, %q", first, rest, job.firstCause())
	}
}

func TestAPanicSettlesTheJob(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	job := newFakeJob()
	job.panics = true
	r.relay.run = func(api.RelayJobRequest) RelayJob { return job }
	req, _ := http.NewRequestWithContext(t.Context(), "POST", r.server.URL+"/v1/relay/jobs", strings.NewReader(relayBody))
	req.Header.Set("Authorization", "Bearer workspace")
	if resp, err := r.server.Client().Do(req); err == nil {
		if b, err := io.ReadAll(resp.Body); err == nil {
			t.Errorf("half an answer was taken for a whole one: %s", b)
		}
		resp.Body.Close()
	}
	if cause := job.firstCause(); cause != "the request ended" {
		t.Errorf("left because %q", cause)
	}
}

func TestBadRelayRequests(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	deep := strings.Repeat("[", 20000) + strings.Repeat("]", 20000)
	for name, tc := range map[string]struct {
		body string
		head []string
		want int
	}{
		"empty":            {"", nil, 400},
		"not JSON":         {"{", nil, 400},
		"NaN":              {`{"daemon_id":"a","payload":{"x":NaN}}`, nil, 400},
		"a list":           {`[]`, nil, 400},
		"two values":       {relayBody + relayBody, nil, 400},
		"not UTF-8":        {"{\"daemon_id\":\"a\xff\",\"payload\":{}}", nil, 400},
		"unknown field":    {`{"daemon_id":"a","payload":{},"Payload":{}}`, nil, 400},
		"field twice":      {`{"daemon_id":"a","payload":{},"payload":{}}`, nil, 400},
		"many fields":      {`{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1,"j":1,"k":1,"l":1,"m":1,"n":1,"o":1,"p":1,"q":1}`, nil, 400},
		"no daemon":        {`{"payload":{}}`, nil, 400},
		"daemon a number":  {`{"daemon_id":1,"payload":{}}`, nil, 400},
		"daemon too long":  {`{"daemon_id":"` + strings.Repeat("a", 513) + `","payload":{}}`, nil, 400},
		"no payload":       {`{"daemon_id":"a"}`, nil, 400},
		"payload null":     {`{"daemon_id":"a","payload":null}`, nil, 400},
		"payload a list":   {`{"daemon_id":"a","payload":[]}`, nil, 400},
		"too deep":         {`{"daemon_id":"a","payload":{"x":` + deep + `}}`, nil, 400},
		"time-out a float": {`{"daemon_id":"a","payload":{},"timeout_ms":1.5}`, nil, 400},
		"too large":        {`{"daemon_id":"a","payload":{"x":"` + strings.Repeat("a", 1<<20+relayFields) + `"}}`, nil, 413},
		"a form":           {relayBody, []string{"Content-Type: application/x-www-form-urlencoded"}, 415},
		"encoded":          {relayBody, []string{"Content-Encoding: gzip"}, 415},
		"HTML wanted":      {relayBody, []string{"Accept: text/html, image/*"}, 406},
		"lines not wanted": {relayBody, []string{"Accept: application/x-ndjson;q=0"}, 406},
	} {
		t.Run(name, func(t *testing.T) {
			resp, b := r.do("POST", "/v1/relay/jobs", "workspace", strings.NewReader(tc.body), tc.head...)
			r.problem(resp, b, tc.want, errdefs.Invalid)
		})
	}
	if calls := r.broker.noted(); len(calls) > 0 {
		t.Errorf("these were reached: %v", calls)
	}
	resp, b := r.do("POST", "/v1/relay/fences/laptop/clear", "admin", strings.NewReader(`{"fence":"f1","reason":"short"}`), "Content-Type: application/json")
	r.problem(resp, b, 400, errdefs.Invalid)
	resp, b = r.do("POST", "/v1/relay/fences/laptop/clear", "admin", strings.NewReader(`{"reason":"looked at it"}`), "Content-Type: application/json")
	r.problem(resp, b, 400, errdefs.Invalid)
	// An id with a slash in it, escaped, is one name.
	resp, b = r.do("POST", "/v1/relay/fences/a%2Fb/clear", "admin", strings.NewReader(`{"fence":"f1","reason":"looked at it"}`), "Content-Type: application/json")
	if resp.StatusCode != 200 || !strings.Contains(string(b), `"a/b"`) {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
}

func TestAServerWithoutARelay(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	h, err := New(Config{Broker: r.broker, Boxes: r.boxes, Tenants: &fakeTenants{fb: r.broker}})
	if err != nil {
		t.Fatal(err)
	}
	r.server.Config.Handler = h
	for _, rt := range h.order {
		if rt.op.Tags[0] != "relay" {
			continue
		}
		kind := authz.Admin
		if !authz.Allowed(kind, rt.action) {
			kind = authz.Workspace
		}
		path, body, head := sampleRequest(rt)
		resp, b := r.do(rt.op.Method, path, string(kind), body, head...)
		p := r.problem(resp, b, 404, errdefs.NotFound)
		if !strings.Contains(p.Next, "--relay-listen") {
			t.Errorf("%s: no way to have one is named: %+v", rt.op.OperationID, p)
		}
	}
}

func TestARelayAloneHasNoOtherRoutes(t *testing.T) {
	t.Parallel()
	fb := &fakeBroker{}
	h, err := New(Config{Tenants: &fakeTenants{fb: fb}, Relay: &fakeRelay{fb: fb}})
	if err != nil {
		t.Fatal(err)
	}
	for _, rt := range h.order {
		if tag := rt.op.Tags[0]; tag != "relay" && tag != "server" {
			t.Errorf("%s is there", rt.op.OperationID)
		}
	}
	for _, bad := range []Config{{}, {Tenants: &fakeTenants{}}, {Relay: &fakeRelay{}}, {Tenants: &fakeTenants{}, Broker: fb}} {
		if _, err := New(bad); !errdefs.Is(err, errdefs.Internal) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
