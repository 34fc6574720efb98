package gateway

import (
	"sync"
	"time"
)

// watchdog calls expire once when nothing has moved for a while. moved may be
// called from any goroutine.
type watchdog struct {
	mu    sync.Mutex
	timer *time.Timer
	idle  time.Duration
	off   bool
}

func newWatchdog(idle time.Duration, expire func()) *watchdog {
	w := &watchdog{idle: idle}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(idle, func() {
		w.mu.Lock()
		off := w.off
		w.off = true
		w.mu.Unlock()
		if !off {
			expire()
		}
	})
	return w
}

// moved starts the time anew.
func (w *watchdog) moved() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.off {
		w.timer.Reset(w.idle)
	}
}

// stop ends it; expire is not called any more unless it is being called already.
func (w *watchdog) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.off = true
	w.timer.Stop()
}
