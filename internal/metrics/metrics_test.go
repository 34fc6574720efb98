package metrics

import (
	"errors"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

// all calls everything there is to call.
func all(m *Metrics) {
	m.Begin("open-process")(200)
	m.Begin("open-process")(409)
	m.Attached(1)
	m.Opened(false, nil, time.Millisecond)
	m.Opened(true, nil, time.Millisecond)
	m.Opened(false, errdefs.New(errdefs.Fenced, "no"), time.Millisecond)
	m.Closed(true, nil, time.Second)
	m.Closed(false, nil, time.Second)
	m.Closed(false, errors.New("boom"), time.Second)
	m.FenceRaised()
	m.FenceRaised()
	m.FenceCleared()
	m.BytesIn(5)
	m.BytesIn(-5)
	m.BytesOut(7)
	m.Committed(nil, time.Millisecond)
	m.Committed(errors.New("busy"), time.Millisecond)
	m.Moved("", api.StateRunning)
	m.Moved("", api.StateRunning)
	m.Moved(api.StateRunning, api.StateClosed)
	m.Moved(api.StateClosed, "")
	m.SetTargets([]api.Target{{Name: "old", Up: true}})
	m.SetTargets([]api.Target{{Name: "local", Up: true, Boxes: 3, Processes: 4, Fences: 1}, {Name: "far"}})
	m.SetBroker(6, 2, 1)
}

func scrape(m *Metrics) string {
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/v1/metrics", nil))
	return w.Body.String()
}

func TestWhatWasCountedIsShown(t *testing.T) {
	t.Parallel()
	m := New("1.2.3")
	all(m)
	text := scrape(m)
	for _, line := range []string{
		`stockade_info{version="1.2.3"} 1`,
		`stockade_http_requests_total{operation="open-process",status="200"} 1`,
		`stockade_http_requests_total{operation="open-process",status="409"} 1`,
		`stockade_http_request_seconds_count{operation="open-process"} 2`,
		`stockade_http_requests_in_flight 0`,
		`stockade_attached_sockets 1`,
		`stockade_opens_total{outcome="new"} 1`,
		`stockade_opens_total{outcome="repeated"} 1`,
		`stockade_opens_total{outcome="fenced"} 1`,
		`stockade_open_seconds_count 3`,
		`stockade_closes_total{outcome="quiescent"} 1`,
		`stockade_closes_total{outcome="unproven"} 1`,
		`stockade_closes_total{outcome="internal"} 1`,
		`stockade_fences_total{event="raised"} 2`,
		`stockade_fences_total{event="cleared"} 1`,
		`stockade_stdin_bytes_total 5`,
		`stockade_output_bytes_total 7`,
		`stockade_ledger_commits_total{result="ok"} 1`,
		`stockade_ledger_commits_total{result="error"} 1`,
		`stockade_ledger_commit_seconds_count 2`,
		`stockade_processes{state="running"} 1`,
		`stockade_processes{state="closed"} 0`,
		`stockade_target_up{target="local"} 1`,
		`stockade_target_up{target="far"} 0`,
		`stockade_target_boxes{target="local"} 3`,
		`stockade_target_processes{target="local"} 4`,
		`stockade_target_fences{target="local"} 1`,
		`stockade_processes_owned 6`,
		`stockade_processes_unclassified 2`,
		`stockade_log_readers 1`,
	} {
		if !strings.Contains(text, "\n"+line+"\n") {
			t.Errorf("not shown: %s", line)
		}
	}
	if strings.Contains(text, `"old"`) {
		t.Error("a target that is gone is still shown")
	}
}

func TestNoMetricsAtAll(t *testing.T) {
	t.Parallel()
	var m *Metrics
	all(m)
	if text := scrape(m); !strings.Contains(text, "404") {
		t.Errorf("%q", text)
	}
}

func TestTwoSetsShareNothing(t *testing.T) {
	t.Parallel()
	a, b := New("a"), New("b")
	a.FenceRaised()
	if strings.Contains(scrape(b), "stockade_fences_total{") {
		t.Error("one set shows what another counted")
	}
}
