package spool

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// TestAcrossProcesses writes a log in another process while three readers here
// read it from the files at different speeds. Under block each must see every
// byte, by digest; under drop_oldest the gaps and the bytes must add up.
func TestAcrossProcesses(t *testing.T) {
	t.Parallel()
	for _, overflow := range []api.Overflow{api.OverflowBlock, api.OverflowDropOldest} {
		t.Run(string(overflow), func(t *testing.T) {
			t.Parallel()
			const total = 48 << 20
			dir := t.TempDir()
			cmd := exec.Command(os.Args[0], dir)
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %s %d", helperEnv, total, 2<<20, overflow, 7))
			var stderr strings.Builder
			cmd.Stderr = &stderr
			acks, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			ends, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			end := &progress{}
			end.cond.L = &end.mu
			var wg sync.WaitGroup
			wg.Go(func() { // the writer's Next, as the readers learn it
				var b [8]byte
				for {
					if _, err := io.ReadFull(ends, b[:]); err != nil {
						end.set(-1)
						return
					}
					end.set(int64(binary.LittleEndian.Uint64(b[:])))
				}
			})
			ack := newAcks(acks, 3)
			sums := [3]hash.Hash{}
			for i, max := range []int{4 << 10, 64 << 10, 1 << 20} {
				sums[i] = sha256.New()
				f := &follower{r: newReader(t, dir), max: max, overflow: overflow, sum: sums[i], ack: func(cursor int64) { ack.set(i, cursor) }}
				wg.Go(func() {
					if err := f.follow(total, end, i == 1); err != nil {
						t.Errorf("reader %d: %v", i, err)
						end.fail()
					}
				})
			}
			done := make(chan struct{})
			go func() { wg.Wait(); close(done) }()
			end.waitDone()
			_ = acks.Close()
			<-done
			if err := cmd.Wait(); err != nil {
				t.Fatalf("writer: %v: %s", err, stderr.String())
			}
			for i, sum := range sums {
				if got := hex.EncodeToString(sum.Sum(nil)); overflow == api.OverflowBlock && got != stderr.String() {
					t.Errorf("reader %d: digest %s, written was %s", i, got, stderr.String())
				}
			}
			r := newReader(t, dir)
			s, err := r.Recover()
			if err != nil || s.Next != total || s.Stdout+s.Stderr != total {
				t.Fatalf("recovered %+v %v", s, err)
			}
		})
	}
}

// follower reads the log to its end, checking each byte, and acknowledges it.
type follower struct {
	r        *Reader
	max      int
	buf      []byte
	cursor   int64
	overflow api.Overflow
	sum      hash.Hash
	ack      func(int64)
}

// follow reads up to what the writer has told, again and again. Who guesses also
// looks behind that: what it gets must be true, and damage only means that there
// is no whole frame yet.
func (f *follower) follow(total int64, end *progress, guesses bool) error {
	defer end.done()
	f.buf = make([]byte, BufSize(f.max))
	for f.cursor < total {
		limit, err := end.wait(f.cursor)
		if err != nil {
			return err
		}
		for f.cursor < limit {
			if _, err := f.once(limit); err != nil {
				return err
			}
		}
		for more := guesses; more && f.cursor < total; {
			if more, err = f.once(NoLimit); err != nil && !errdefs.Is(err, errdefs.Indeterminate) {
				return err
			}
		}
	}
	return nil
}

func (f *follower) once(limit int64) (bool, error) {
	before := f.cursor
	frames, next, gap, err := f.r.Read(f.cursor, f.max, limit, f.buf)
	if err != nil {
		return false, err
	}
	if gap != nil {
		if f.overflow == api.OverflowBlock {
			return false, fmt.Errorf("gap %+v although nothing may be dropped", gap)
		}
		if gap.From != f.cursor || gap.To <= f.cursor {
			return false, fmt.Errorf("gap %+v at %d", gap, f.cursor)
		}
		f.cursor = gap.To
	}
	records, at, err := decode(frames, f.cursor)
	if err != nil {
		return false, err
	}
	for _, rec := range records {
		if string(rec.data) != string(content(rec.Cursor, rec.Length)) {
			return false, fmt.Errorf("wrong bytes at %d", rec.Cursor)
		}
		f.sum.Write(rec.data)
	}
	if at != next {
		return false, fmt.Errorf("frames end at %d, next is %d", at, next)
	}
	f.cursor = next
	f.ack(f.cursor)
	return f.cursor > before, nil
}

// progress is the last known end of the log, and how many readers are done.
type progress struct {
	mu      sync.Mutex
	cond    sync.Cond
	end     int64
	dead    bool
	readers int
}

func (p *progress) set(end int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if end < 0 {
		p.dead = true
	} else {
		p.end = max(p.end, end)
	}
	p.cond.Broadcast()
}

func (p *progress) fail() { p.set(-1) }

func (p *progress) wait(cursor int64) (int64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.end <= cursor {
		if p.dead {
			return 0, fmt.Errorf("the writer ended at %d, the reader is at %d", p.end, cursor)
		}
		p.cond.Wait()
	}
	return p.end, nil
}

func (p *progress) done() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.readers++
	p.cond.Broadcast()
}

// waitDone returns when all readers are done, or something failed.
func (p *progress) waitDone() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.readers < 3 && !p.dead {
		p.cond.Wait()
	}
}

// acks sends the least acknowledged cursor of several readers.
type acks struct {
	mu   sync.Mutex
	to   io.Writer
	at   []int64
	sent int64
}

func newAcks(to io.Writer, n int) *acks { return &acks{to: to, at: make([]int64, n)} }

func (a *acks) set(i int, cursor int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at[i] = cursor
	least := min(a.at[0], a.at[1], a.at[2])
	if least-a.sent < 256<<10 {
		return
	}
	a.sent = least
	_, _ = a.to.Write(binary.LittleEndian.AppendUint64(nil, uint64(least)))
}
