package relay

import (
	"sync"
	"testing"
)

// TestPollerLetsEveryoneGoOn: however many give way at once, each goes on; and the
// one without a pipe does as well.
func TestPollerLetsEveryoneGoOn(t *testing.T) {
	t.Parallel()
	p := newPoller()
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			way := make(chan struct{}, 1)
			for range 200 {
				p.giveWay(way)
			}
		})
	}
	all.Wait()
	if len(p.wait) != 0 {
		t.Errorf("%d still wait", len(p.wait))
	}
	p.close()
	none := &poller{}
	none.giveWay(nil)
	none.close()
}
