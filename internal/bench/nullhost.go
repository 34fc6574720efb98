package bench

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// nullHost speaks the host API and starts nothing: every process runs at once
// and for ever, says nothing, and is gone the moment it is closed. What is
// measured against it is the server's own share, with no backend in it.
type nullHost struct {
	boot string

	mu       sync.Mutex
	procs    map[string]*wire.ProcState
	boxes    map[string]wire.BoxInfo
	watchers map[chan wire.ProcState]bool
}

func newNullHost() *nullHost {
	return &nullHost{boot: "bench", procs: map[string]*wire.ProcState{}, boxes: map[string]wire.BoxInfo{}, watchers: map[chan wire.ProcState]bool{}}
}

// serve answers on l until ctx ends.
func (h *nullHost) serve(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/info", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, wire.HostInfo{HostID: "host_aaaaaaaaaaaaaaaaaaaaaaaaaa", BootID: h.boot, Protocol: wire.Protocol, Version: "null", Runtime: "none"})
	})
	none := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }
	mux.HandleFunc("PUT /v1/lease", none)
	mux.HandleFunc("POST /v1/shutdown", none)
	mux.HandleFunc("PUT /v1/boxes/{box}", h.putBox)
	mux.HandleFunc("GET /v1/boxes", h.listBoxes)
	mux.HandleFunc("GET /v1/boxes/{box}", h.getBox)
	mux.HandleFunc("DELETE /v1/boxes/{box}", none)
	mux.HandleFunc("GET /v1/procs", h.listProcs)
	mux.HandleFunc("PUT /v1/procs/{proc}", h.putProc)
	mux.HandleFunc("GET /v1/procs/{proc}", h.getProc)
	mux.HandleFunc("GET /v1/procs/{proc}/log", h.log)
	mux.HandleFunc("POST /v1/procs/{proc}/close", h.close)
	mux.HandleFunc("DELETE /v1/procs/{proc}", none)
	mux.HandleFunc("GET /v1/watch", h.watch)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(l); ctx.Err() == nil {
		return err
	}
	return nil
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter) {
	w.Header().Set("Content-Type", api.ProblemType)
	w.WriteHeader(http.StatusNotFound)
	_ = json.NewEncoder(w).Encode(api.Problem{Code: "not_found", Status: http.StatusNotFound, Detail: "the null host does not know it"})
}

func (h *nullHost) putBox(w http.ResponseWriter, r *http.Request) {
	var spec wire.BoxSpec
	if json.NewDecoder(r.Body).Decode(&spec) != nil {
		refuse(w)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.boxes[spec.ID] = wire.BoxInfo{Spec: spec}
	answer(w, h.boxes[spec.ID])
}

func (h *nullHost) getBox(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b, ok := h.boxes[r.PathValue("box")]; ok {
		answer(w, b)
		return
	}
	refuse(w)
}

func (h *nullHost) listBoxes(w http.ResponseWriter, _ *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := []wire.BoxInfo{}
	for _, b := range h.boxes {
		all = append(all, b)
	}
	answer(w, all)
}

func (h *nullHost) putProc(w http.ResponseWriter, r *http.Request) {
	var spec wire.ProcSpec
	if json.NewDecoder(r.Body).Decode(&spec) != nil {
		refuse(w)
		return
	}
	now := time.Now().UTC()
	h.mu.Lock()
	defer h.mu.Unlock()
	st, ok := h.procs[spec.ID]
	if !ok {
		st = &wire.ProcState{ID: spec.ID, Box: spec.Box, Rev: 1, Phase: wire.PhaseRunning, Started: &now,
			Stdin: api.StdinState{EOF: !spec.Stdin}}
		h.procs[spec.ID] = st
	}
	answer(w, st)
}

func (h *nullHost) getProc(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if st, ok := h.procs[r.PathValue("proc")]; ok {
		answer(w, st)
		return
	}
	refuse(w)
}

func (h *nullHost) listProcs(w http.ResponseWriter, _ *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := []*wire.ProcState{}
	for _, st := range h.procs {
		all = append(all, st)
	}
	answer(w, all)
}

// log waits as long as it is asked to, or for ever when followed, and then says
// that there is nothing yet.
func (h *nullHost) log(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", wire.FramesType)
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	wait, _ := strconv.Atoi(r.URL.Query().Get("wait_ms"))
	var expired <-chan time.Time
	if r.URL.Query().Get("follow") != "true" {
		expired = time.After(time.Duration(wait) * time.Millisecond)
	}
	select {
	case <-r.Context().Done():
		return
	case <-expired:
	}
	status, _ := json.Marshal(wire.StatusFrame{Phase: wire.PhaseRunning})
	frame := wire.AppendHeader(nil, wire.Header{Kind: wire.KindStatus, Length: len(status), Sum: wire.Sum(status)})
	_, _ = w.Write(append(frame, status...))
}

func (h *nullHost) close(w http.ResponseWriter, r *http.Request) {
	now := time.Now().UTC()
	h.mu.Lock()
	defer h.mu.Unlock()
	st, ok := h.procs[r.PathValue("proc")]
	if !ok {
		refuse(w)
		return
	}
	if st.Phase != wire.PhaseEnded {
		st.Rev, st.Phase, st.Ended, st.Log.EOF = st.Rev+1, wire.PhaseEnded, &now, true
		st.Exit = &api.Exit{Kind: api.ExitSignalled, Signal: "SIGTERM"}
		st.Proof = &wire.Proof{Method: "pid_namespace", BootID: h.boot, Container: st.ID, EmptyAt: now}
		for ch := range h.watchers {
			select {
			case ch <- *st:
			default: // the answer to close says it as well
			}
		}
	}
	answer(w, st)
}

func (h *nullHost) watch(w http.ResponseWriter, r *http.Request) {
	ch := make(chan wire.ProcState, 1024)
	h.mu.Lock()
	first := make([]wire.ProcState, 0, len(h.procs))
	for _, st := range h.procs {
		first = append(first, *st)
	}
	h.watchers[ch] = true
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		delete(h.watchers, ch)
		h.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/x-ndjson")
	enc, ctl := json.NewEncoder(w), http.NewResponseController(w)
	for _, st := range first {
		if enc.Encode(st) != nil {
			return
		}
	}
	for {
		if ctl.Flush() != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case st := <-ch:
			if enc.Encode(st) != nil {
				return
			}
		}
	}
}
