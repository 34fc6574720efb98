package relay

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// Whatever is put, and taken in between, comes out once and in order, within the
// bounds, and at the end the disk and the hub's count are empty.
func TestQueueKeepsOrder(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		memory := rapid.Int64Range(1, 1<<17).Draw(t, "memory")
		diskMax := rapid.SampledFrom([]int64{-1, 1 << 18, 1 << 20}).Draw(t, "disk")
		limit := rapid.SampledFrom([]int64{1 << 17, 1 << 30}).Draw(t, "limit")
		var total atomic.Int64
		q := newQueue(memory, &spill{dir: dir, max: diskMax, total: &total, limit: limit})
		defer q.drop()
		put, got := 0, 0
		check := func(events []json.RawMessage) {
			for _, e := range events {
				if !strings.HasPrefix(string(e), fmt.Sprintf("%d ", got)) {
					t.Fatalf("got %.20q, want event %d", e, got)
				}
				got++
			}
		}
		take := func() bool {
			var b batch
			if err := q.take(context.Background(), &b); err != nil {
				t.Fatal(err)
			}
			check(b.events)
			n := len(b.events)
			if rapid.Bool().Draw(t, "free") {
				b.free()
			}
			return n > 0
		}
		for range rapid.IntRange(0, 60).Draw(t, "operations") {
			if rapid.IntRange(0, 3).Draw(t, "op") > 0 {
				size := rapid.SampledFrom([]int{8, 200, 5000, 70_000, 300_000}).Draw(t, "size")
				event := fmt.Sprintf("%d %s", put, strings.Repeat("x", size))
				a, err := q.put([]byte(event), rapid.Bool().Draw(t, "disk"))
				if err != nil {
					t.Fatal(err)
				}
				if a == taken {
					put++
				}
				// One event, one piece of the spill's tail, and one that is too large for
				// either may be more than the bound.
				if m, d := q.sizes(); m > memory+int64(len(event))+tailBytes+300_010 || d > max(0, diskMax) {
					t.Fatalf("%d bytes in memory, %d on disk", m, d)
				}
			} else if got < put {
				take()
			}
		}
		last := rapid.Bool().Draw(t, "last")
		if last {
			q.finish([]byte(fmt.Sprintf("%d last", put)))
			put++
		} else {
			q.finish(nil)
		}
		for take() {
		}
		if got != put || total.Load() != 0 {
			t.Fatalf("%d of %d came out, %d bytes are still counted", got, put, total.Load())
		}
	})
	if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
		t.Errorf("the spill left %v, %v", names, err)
	}
}

func TestQueueDropGivesEverythingBack(t *testing.T) {
	t.Parallel()
	var total atomic.Int64
	q := newQueue(1, &spill{dir: t.TempDir(), max: 1 << 20, total: &total, limit: 1 << 30})
	for range 5 {
		if a, err := q.put(make([]byte, 100_000), true); a != taken || err != nil {
			t.Fatal(a, err)
		}
	}
	q.drop()
	q.drop()
	if a, _ := q.put([]byte("x"), true); a != dropped || total.Load() != 0 || q.disk.file != nil {
		t.Errorf("after the drop: %v, %d bytes counted, file %v", a, total.Load(), q.disk.file)
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse)
}

// A consumer that stops reading: the hub's memory stays bounded, another job of the
// same daemon goes on, and nothing is lost when the consumer goes on.
func TestConsumerThatStopsReading(t *testing.T) {
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	stuck := run(t, h, p, JobRequest{DaemonID: "d"})
	other := run(t, h, p, JobRequest{DaemonID: "d"})
	before := heap()
	const events, size = 6000, 16 << 10 // 94 MiB
	event := string(eventOf(size))
	for i := range events {
		p.event(stuck.ID(), event)
		if i%1000 == 0 {
			p.event(other.ID(), `{"type":"alive"}`)
			ctx, cancel := context.WithTimeout(context.Background(), soon)
			if _, err := other.Next(ctx); err != nil {
				t.Fatalf("the other job waits: %v", err)
			}
			cancel()
		}
	}
	p.sync()
	if grown := heap() - before; grown > 24<<20 {
		t.Errorf("the hub grew by %d bytes", grown)
	}
	for _, j := range h.Jobs() {
		if j.ID == stuck.ID() && (j.Events != events || j.SpillBytes < events*size/2) {
			t.Errorf("it says %+v", j)
		}
	}
	p.finish(other.ID())
	if _, err := collect(t, other); err != nil {
		t.Fatal(err)
	}
	p.finish(stuck.ID())
	got, err := collect(t, stuck)
	if err != nil || len(got) != events || got[0] != event || got[events-1] != event {
		t.Errorf("got %d events of %d, %v", len(got), events, err)
	}
	eventually(t, "the spill is given back", func() bool { return h.spilled.Load() == 0 })
}

// Without a disk the daemon itself is made to wait, and goes on with the consumer.
func TestOnlyJobOfADaemonIsPaused(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.SpillBytes = -1; c.Limits.QueueBytes = 64 << 10 })
	p := rawConnect(t, url, "d")
	j, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	p.recv(t)
	const events = 5000
	sent := make(chan error, 1)
	go func() { sent <- p.flood(j.ID(), eventOf(16<<10), events) }()
	eventually(t, "the daemon is paused", func() bool { jobs := h.Jobs(); return len(jobs) == 1 && jobs[0].Waiting })
	beside := connect(t, url, "beside")
	b := run(t, h, beside, JobRequest{DaemonID: "beside"})
	beside.finish(b.ID())
	if _, err := collect(t, b); err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, j)
	if err != nil || len(got) != events {
		t.Errorf("got %d events of %d, %v", len(got), events, err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// When there is no room left, a job that shares its connection is ended, and only it.
func TestOverflowEndsOnlyThatJob(t *testing.T) {
	t.Parallel()
	for name, alone := range map[string]bool{"beside another": false, "alone": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h, url := newHub(t, func(c *HubConfig) {
				c.Limits.SpillBytes, c.Limits.QueueBytes, c.Limits.StallTimeout = 256<<10, 64<<10, time.Hour
				if alone {
					c.Limits.StallTimeout = 200 * time.Millisecond
				}
			})
			p := connect(t, url, "d")
			flood := run(t, h, p, JobRequest{DaemonID: "d"})
			var other *Job
			if !alone {
				other = run(t, h, p, JobRequest{DaemonID: "d"})
			}
			event := eventOf(16 << 10)
			for range 64 {
				p.event(flood.ID(), string(event))
			}
			if f := p.want(relaywire.Cancel); f.JobID != flood.ID() {
				t.Fatalf("got %v", f)
			}
			p.finish(flood.ID())
			got, err := collect(t, flood)
			wantCode(t, err, relaywire.CodeOverflow)
			if len(got) < 4 || got[0] != string(event) {
				t.Errorf("%d events were kept", len(got))
			}
			if o := flood.Outcome(); !o.Acknowledged || o.Code != "relay.job_overflow" {
				t.Errorf("the outcome is %+v", o)
			}
			if other != nil {
				p.event(other.ID(), `{"type":"x"}`)
				p.finish(other.ID())
				if got, err := collect(t, other); err != nil || len(got) != 1 {
					t.Errorf("the other job got %q, %v", got, err)
				}
			}
		})
	}
}

// Events that were there when the job's context ended are given up, with their disk.
func TestContextEndDropsEvents(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.QueueBytes = 1 })
	p := connect(t, url, "d")
	ctx, cancel := context.WithCancel(context.Background())
	j, err := h.RunJob(ctx, JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	p.want(relaywire.Start)
	for range 20 {
		p.event(j.ID(), string(eventOf(16<<10)))
	}
	p.finish(j.ID())
	<-j.Done()
	if h.spilled.Load() == 0 {
		t.Fatal("nothing was spilled")
	}
	cancel()
	eventually(t, "the spill is given back", func() bool { return h.spilled.Load() == 0 })
	if _, err := j.Next(context.Background()); err != io.EOF {
		t.Errorf("got %v", err) // it had finished
	}
}
