package host

import (
	"context"
	"encoding/json"
	"time"
)

// watchBeat is how often an idle watch sends an empty line, so that either end
// learns that the other is gone.
const watchBeat = 15 * time.Second

// watchStall is how long a watcher may take to accept what is sent to it.
const watchStall = time.Minute

// watch streams states: every process once, then each again when its Rev
// changes. A slow consumer gets the newest state of what changed meanwhile.
func (s *server) watch(ctx context.Context, r *request) error {
	w := s.reg.hub.watch()
	defer w.close()
	w.mark(s.reg.ids())
	r.w.Header().Set("Content-Type", "application/x-ndjson")
	beat := time.NewTicker(watchBeat)
	defer beat.Stop()
	defer func() { _ = r.control.SetWriteDeadline(time.Time{}) }()
	send := func(line []byte) error {
		_ = r.control.SetWriteDeadline(time.Now().Add(watchStall))
		_, err := r.w.Write(line)
		return err
	}
	for {
		for _, id := range w.take() {
			p, err := s.reg.find(id)
			if err != nil {
				continue // forgotten
			}
			line, err := json.Marshal(p.state())
			if err != nil {
				return err
			}
			if send(append(line, '\n')) != nil {
				return nil
			}
		}
		if r.control.Flush() != nil {
			return nil
		}
		select {
		case <-w.wake:
		case <-beat.C:
			if send([]byte{'\n'}) != nil {
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}
