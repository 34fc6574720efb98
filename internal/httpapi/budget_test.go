package httpapi

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// What passes through is bounded too, and a relay job's payload while it is here.
func TestWhatPassesThroughIsInTheBudget(t *testing.T) {
	t.Parallel()
	r := waiting(t, time.Hour)
	r.h.budget.most = 2 * passBytes
	r.follow("workspace")
	r.dialAs("workspace", "")
	for name, ask := range map[string]func() (*http.Response, []byte){
		"frames": func() (*http.Response, []byte) { return r.do("GET", logPath, "run", nil, "Accept: "+wire.FramesType) },
		"files": func() (*http.Response, []byte) {
			return r.do("PUT", "/v1/boxes/box_x/files", "workspace", strings.NewReader("x"))
		},
		"a job": func() (*http.Response, []byte) {
			return r.do("POST", "/v1/relay/jobs", "workspace", strings.NewReader(relayBody))
		},
	} {
		resp, b := ask()
		if p := r.problem(resp, b, 429, errdefs.Exhausted); !strings.Contains(p.Detail, "131072") {
			t.Errorf("%s: %+v", name, p)
		}
	}

	// A job that was sent is the relay's.
	r.h.budget.mu.Lock()
	r.h.budget.most += requestBytes + int64(len(relayBody))
	r.h.budget.mu.Unlock()
	job := newFakeJob()
	job.endless = true
	r.relay.run = func(api.RelayJobRequest) RelayJob { return job }
	for range 2 {
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		req, _ := http.NewRequestWithContext(ctx, "POST", r.server.URL+"/v1/relay/jobs", strings.NewReader(relayBody))
		req.Header.Set("Authorization", "Bearer workspace")
		resp, err := r.server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Errorf("a job beside one that was sent: %s", resp.Status)
		}
	}
}

// One workspace cannot take the memory of all; what it took comes back.
func TestTheBudgetOfAWorkspace(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.h.budget.most = 3 << 20
	held, release := make(chan struct{}, 2), make(chan struct{})
	r.broker.read = func(ReadQuery) (api.ReadResponse, error) {
		held <- struct{}{}
		<-release
		return api.ReadResponse{}, nil
	}
	done := make(chan struct{}, 2)
	for range 2 {
		go func() {
			defer func() { done <- struct{}{} }()
			req, _ := http.NewRequestWithContext(context.Background(), "GET", r.server.URL+logPath, nil)
			req.Header.Set("Authorization", "Bearer workspace")
			if resp, err := r.server.Client().Do(req); err != nil {
				t.Error(err)
			} else {
				resp.Body.Close()
			}
		}()
	}
	<-held
	<-held
	resp, b := r.do("GET", logPath, "run", nil) // of the same workspace
	p := r.problem(resp, b, 429, errdefs.Exhausted)
	if resp.Header.Get("Retry-After") == "" || !strings.Contains(p.Detail, "3145728") {
		t.Errorf("got %+v", p)
	}
	resp, b = r.do("POST", "/v1/processes", "run", strings.NewReader(`{"request_id":"a","argv":["`+strings.Repeat("x", 400<<10)+`"]}`))
	r.problem(resp, b, 429, errdefs.Exhausted)
	if resp, b := r.do("GET", logPath, "run", nil, "Accept: "+wire.FramesType); resp.StatusCode != 200 {
		t.Errorf("frames: %s", b)
	}
	if resp, b := r.do("GET", "/v1/targets", "admin", nil); resp.StatusCode != 200 {
		t.Errorf("the operator: %s", b)
	}
	close(release)
	<-done
	<-done
	if resp, b := r.do("GET", logPath, "workspace", nil); resp.StatusCode != 200 {
		t.Errorf("afterwards: %s", b)
	}
	r.server.Close() // waits for every request
	if n := len(r.h.budget.held); n != 0 {
		t.Errorf("%d budgets are held by nobody", n)
	}
}
