package pluginhost

import (
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

const (
	// lastUseFile is a list of installations, the most recently used first.
	lastUseFile = "last-use.json"
	// maxLastUse bounds it: the published runtime's max_installations.
	maxLastUse = 10_000
	// saveLastUse is how long a use may be unsaved. What is lost with a crash is a bit
	// of order, and nothing else.
	saveLastUse = time.Minute
)

// lastUse remembers in which order installations were last called, so that after a
// restart the ones in use are launched first. It counts and does not look at the
// clock, which may jump. It is safe for concurrent use.
type lastUse struct {
	dir   string
	log   *slog.Logger
	count atomic.Int64
	dirty atomic.Bool

	mu     sync.Mutex
	at     map[string]*atomic.Int64 // count of the last use, by installation
	timer  *time.Timer              // of the next save; nil: never needed so far
	closed bool
}

// openLastUse reads what an earlier runtime left; what cannot be read is forgotten.
func openLastUse(dir string, log *slog.Logger) *lastUse {
	u := &lastUse{dir: dir, log: log, at: map[string]*atomic.Int64{}}
	f, err := os.Open(filepath.Join(dir, lastUseFile))
	if errors.Is(err, fs.ErrNotExist) {
		return u
	}
	var names []string
	if err == nil {
		defer f.Close()
		err = json.NewDecoder(io.LimitReader(f, maxLastUse*(128+4))).Decode(&names)
	}
	if err != nil {
		log.Warn("in which order installations were used cannot be read and is forgotten", "err", err)
		return u
	}
	for _, name := range slices.Backward(names[:min(len(names), maxLastUse)]) {
		if installationName.MatchString(name) {
			u.of(name).Store(u.count.Add(1))
		}
	}
	return u
}

// of returns the mark of an installation, for touch.
func (u *lastUse) of(uuid string) *atomic.Int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	mark := u.at[uuid]
	if mark == nil {
		if len(u.at) >= maxLastUse {
			return new(atomic.Int64) // an installation beyond every limit has no order
		}
		mark = new(atomic.Int64)
		u.at[uuid] = mark
	}
	return mark
}

// touch notes a use.
func (u *lastUse) touch(mark *atomic.Int64) {
	mark.Store(u.count.Add(1))
	if u.dirty.Load() || !u.dirty.CompareAndSwap(false, true) {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.timer == nil && !u.closed {
		u.timer = time.AfterFunc(saveLastUse, u.save)
	} else if u.timer != nil {
		u.timer.Reset(saveLastUse)
	}
}

// order sorts desired states: the most recently used first, then as they came.
func (u *lastUse) order(want []pluginwire.DesiredState) []pluginwire.DesiredState {
	u.mu.Lock()
	defer u.mu.Unlock()
	mark := func(w pluginwire.DesiredState) int64 {
		if m := u.at[w.Binding.InstallationUUID]; m != nil {
			return m.Load()
		}
		return 0
	}
	out := slices.Clone(want)
	marks := map[string]int64{} // a plugin may be called meanwhile
	for _, w := range out {
		marks[w.Binding.InstallationUUID] = mark(w)
	}
	slices.SortStableFunc(out, func(a, b pluginwire.DesiredState) int {
		return cmp.Compare(marks[b.Binding.InstallationUUID], marks[a.Binding.InstallationUUID])
	})
	return out
}

// keep forgets every installation but these.
func (u *lastUse) keep(wanted map[string]pluginwire.Context) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for uuid := range u.at {
		if _, ok := wanted[uuid]; !ok {
			delete(u.at, uuid)
		}
	}
}

func (u *lastUse) save() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.closed {
		u.saveLocked()
	}
}

func (u *lastUse) saveLocked() {
	u.dirty.Store(false)
	type use struct {
		name string
		at   int64
	}
	var uses []use
	for name, mark := range u.at {
		if n := mark.Load(); n > 0 {
			uses = append(uses, use{name, n})
		}
	}
	slices.SortFunc(uses, func(a, b use) int { return cmp.Compare(b.at, a.at) })
	names := make([]string, len(uses))
	for i, one := range uses {
		names[i] = one.name
	}
	raw, err := json.Marshal(names)
	if err == nil {
		err = durable.Atomic(u.dir, lastUseFile, raw)
	}
	if err != nil {
		u.log.Warn("in which order installations were used cannot be saved", "err", err)
	}
}

// close saves what is not saved yet.
func (u *lastUse) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		return
	}
	u.closed = true
	if u.timer != nil {
		u.timer.Stop()
	}
	if u.dirty.Load() {
		u.saveLocked()
	}
}
