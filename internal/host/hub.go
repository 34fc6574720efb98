package host

import "sync"

// hub tells watchers which processes changed. A watcher that is slow holds one
// entry per process, never one per change, so memory is bounded by the number
// of processes.
type hub struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

type watcher struct {
	hub   *hub
	dirty map[string]struct{} // guarded by hub.mu
	wake  chan struct{}       // capacity 1; sent to when dirty became non-empty
}

func newHub() *hub { return &hub{watchers: map[*watcher]struct{}{}} }

// watch adds a watcher. To see every process once, mark all of them after it, so
// that none can come between.
func (h *hub) watch() *watcher {
	w := &watcher{hub: h, dirty: map[string]struct{}{}, wake: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watchers[w] = struct{}{}
	return w
}

// mark makes the watcher see these processes.
func (w *watcher) mark(ids []string) {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	for _, id := range ids {
		w.add(id)
	}
}

func (w *watcher) add(id string) {
	w.dirty[id] = struct{}{}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (h *hub) changed(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		w.add(id)
	}
}

// take returns what changed since the last take.
func (w *watcher) take() []string {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	ids := make([]string, 0, len(w.dirty))
	for id := range w.dirty {
		ids = append(ids, id)
	}
	clear(w.dirty)
	return ids
}

func (w *watcher) close() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	delete(w.hub.watchers, w)
}
