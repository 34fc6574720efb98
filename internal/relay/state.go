package relay

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// The files of a state directory. A marker is the one the Python hub writes: the
// daemon id, in a file named by its SHA-256. The rest is ours.
const (
	markerSuffix   = ".pending"    // may have something running: a fence for the next hub
	spareSuffix    = ".idle"       // a marker that means nothing, to be renamed to one that does
	evidenceSuffix = ".fence.json" // what is known about a fence; a marker is beside it
	auditFile      = "audit.jsonl" // one line per cleared fence
	lockName       = "lock"
)

// stateDir keeps markers, evidence and the audit log of one hub.
type stateDir struct {
	path string
	lock *os.File
	dir  *os.File // to sync names

	mu sync.Mutex // audit
}

var keyForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// openState locks the directory and reads its fences.
func openState(path, prefix string, now time.Time) (_ *stateDir, _ []Fence, err error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, nil, diskFailure(err, "the relay's state directory %s cannot be made", path)
	}
	s := &stateDir{path: path}
	defer func() {
		if err != nil {
			_ = s.close()
		}
	}()
	if s.lock, err = os.OpenFile(filepath.Join(path, lockName), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, nil, diskFailure(err, "the relay's lock cannot be opened")
	}
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(s.lock.Fd(), unix.F_OFD_SETLK, &lk); err != nil {
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			return nil, nil, relaywire.Errorf(prefix, relaywire.CodeHubConflict, "another relay hub uses %s", path).
				WithNext("stop that one, or give this one a state directory of its own")
		}
		return nil, nil, diskFailure(err, "the relay's state directory cannot be locked")
	}
	if s.dir, err = os.Open(path); err != nil {
		return nil, nil, diskFailure(err, "the relay's state directory cannot be opened")
	}
	fences, err := s.load(now)
	return s, fences, err
}

// load turns every marker into a fence. A marker that does not say whose it is still
// fences the id it is named after; one that says nothing at all stops the hub,
// because nobody could be fenced by it.
func (s *stateDir) load(now time.Time) ([]Fence, error) {
	spares, err := filepath.Glob(filepath.Join(s.path, "*"+spareSuffix))
	for _, name := range spares {
		err = errors.Join(err, os.Remove(name))
	}
	if err != nil {
		return nil, diskFailure(err, "the relay's spare markers cannot be removed")
	}
	names, err := filepath.Glob(filepath.Join(s.path, "*"+markerSuffix))
	if err != nil {
		return nil, diskFailure(err, "the relay's markers cannot be listed")
	}
	byKey := map[string]Fence{}
	for _, name := range names {
		raw, err := os.ReadFile(name)
		if err != nil {
			return nil, diskFailure(err, "the marker %s cannot be read", filepath.Base(name))
		}
		id := strings.TrimSpace(string(raw))
		if len(id) > relaywire.EnvelopeBytes || !utf8.ValidString(id) {
			id = ""
		}
		key := strings.TrimSuffix(filepath.Base(name), markerSuffix)
		if id != "" && keyOf(id) != key {
			// Named by hand, or two markers in one: the id it says is fenced too.
			if _, err := os.Stat(filepath.Join(s.path, keyOf(id)+markerSuffix)); errors.Is(err, fs.ErrNotExist) {
				if err := s.mark(keyOf(id), id, false); err != nil {
					return nil, err
				}
			}
			byKey[keyOf(id)] = s.evidence(keyOf(id), id, now)
			id = ""
		}
		if !keyForm.MatchString(key) {
			if len(raw) == 0 || !utf8.Valid(raw) {
				return nil, errdefs.New(errdefs.Conflict, "the marker %s in %s does not say which daemon it fences", filepath.Base(name), s.path).
					WithNext("verify every daemon of this relay, then delete it")
			}
			if err := os.Remove(name); err != nil {
				return nil, diskFailure(err, "the marker %s cannot be renamed", filepath.Base(name))
			}
			continue
		}
		byKey[key] = s.evidence(key, id, now)
	}
	if err := s.sweep(byKey); err != nil {
		return nil, diskFailure(err, "the evidence of fences that were cleared cannot be removed")
	}
	fences := make([]Fence, 0, len(byKey))
	for _, f := range byKey {
		fences = append(fences, f)
	}
	return fences, nil
}

// sweep removes the evidence of fences that do not stand, and what was half written: a
// hub that died while it lifted one left it, and it would be shown as that of the
// daemon's next fence.
func (s *stateDir) sweep(stand map[string]Fence) error {
	names, err := filepath.Glob(filepath.Join(s.path, "*"+evidenceSuffix+"*"))
	for _, name := range names {
		if _, ok := stand[strings.TrimSuffix(filepath.Base(name), evidenceSuffix)]; !ok {
			err = errors.Join(err, os.Remove(name))
		}
	}
	return err
}

// evidence reads what the hub before this one knew.
func (s *stateDir) evidence(key, id string, now time.Time) Fence {
	var f Fence
	raw, err := os.ReadFile(filepath.Join(s.path, key+evidenceSuffix))
	if err == nil && json.Unmarshal(raw, &f) == nil && f.Key == key {
		f.DaemonID = id
		return f
	}
	f = Fence{DaemonID: id, Key: key, Since: now, Code: FenceHubDied,
		Cause: "the relay hub ended while a job ran there, or while its end was not confirmed"}
	if id == "" {
		f.Code, f.Cause = FenceDamaged, "its marker does not say which daemon it is; the daemon whose id has this hash is fenced"
	}
	// A marker may be a renamed one: when its name changed is when the job began.
	var st unix.Stat_t
	if unix.Stat(filepath.Join(s.path, key+markerSuffix), &st) == nil {
		f.Since = time.Unix(st.Ctim.Unix())
	}
	return f
}

// mark makes a marker and syncs it and its name. It must not exist. With spare, the
// target's spare marker exists: renaming it costs one sync instead of two. After an
// error neither is there.
func (s *stateDir) mark(key, id string, spare bool) (err error) {
	path, idle := filepath.Join(s.path, key+markerSuffix), filepath.Join(s.path, key+spareSuffix)
	made := false
	defer func() {
		if err != nil {
			_ = os.Remove(idle)
			if made {
				_ = os.Remove(path)
			}
		}
	}()
	if spare {
		err = unix.Renameat2(unix.AT_FDCWD, idle, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
	} else {
		var f *os.File
		if f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
			made = true
			_, err = f.WriteString(id)
			if err == nil {
				err = f.Sync()
			}
			err = errors.Join(err, f.Close())
		}
	}
	if err != nil {
		return err
	}
	made = true
	return s.dir.Sync()
}

// lay turns a marker into the target's spare one. Without a sync: a power cut may
// bring the marker back, a fence too many, never one too few.
func (s *stateDir) lay(key string) error {
	return os.Rename(filepath.Join(s.path, key+markerSuffix), filepath.Join(s.path, key+spareSuffix))
}

// discard removes a target's spare marker.
func (s *stateDir) discard(key string) error {
	return gone(os.Remove(filepath.Join(s.path, key+spareSuffix)))
}

// unmark removes what is known about a fence, then its marker, for good. In this order
// evidence never outlives its marker, to be taken for that of the next fence.
func (s *stateDir) unmark(key string) error {
	for _, suffix := range []string{evidenceSuffix, markerSuffix} {
		if err := gone(os.Remove(filepath.Join(s.path, key+suffix))); err != nil {
			return err
		}
	}
	return s.dir.Sync()
}

func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// writeEvidence replaces what is known about a fence, in one step.
func (s *stateDir) writeEvidence(f Fence) error {
	raw, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(s.path, f.Key+evidenceSuffix)
	tmp, err := os.OpenFile(path+".tmp", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = tmp.Write(append(raw, '\n'))
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(path+".tmp", path)
	}
	if err == nil {
		err = s.dir.Sync()
	}
	return err
}

// audit adds a line and syncs it.
func (s *stateDir) audit(entry any) error {
	raw, err := json.Marshal(entry)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f, err := os.OpenFile(filepath.Join(s.path, auditFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(raw, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = s.dir.Sync()
	}
	return err
}

func (s *stateDir) close() error {
	var err error
	for _, f := range []*os.File{s.dir, s.lock} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

func diskFailure(err error, format string, args ...any) error {
	return errdefs.Wrap(err, errdefs.Unavailable, format, args...).WithNext("look at the disk: %v", err)
}
