package pluginhost

import (
	"context"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Shutdown stops every worker at the same time, each in its own order (see
// endWorker), and waits for them until ctx ends; what is left then is ended by
// the launcher. It may be called again; nothing can be started afterwards.
func (m *Manager) Shutdown(ctx context.Context) error {
	m.mu.Lock()
	m.closing = true
	launcher := m.launcher
	m.mu.Unlock()
	m.end(errClosing())
	m.uses.close()
	done := make(chan struct{})
	go func() {
		m.running.Wait()
		close(done)
	}()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = errdefs.Wrap(context.Cause(ctx), errdefs.Unavailable, "plugin workers did not stop in time and are killed")
	}
	if launcher != nil {
		if cerr := launcher.Close(); cerr != nil && err == nil {
			err = cerr
		}
	}
	// With its processes gone, a supervisor waits for nothing but its own handlers.
	timer := time.NewTimer(JoinWithin)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		m.log.Error("supervisors of plugin workers did not end and are left behind", "within", JoinWithin)
	}
	return err
}
