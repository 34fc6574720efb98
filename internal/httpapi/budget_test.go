package httpapi

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

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
