package transfer

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

const (
	unbound   = "unbound"
	ownersDir = ".transfer-owners"
	maxRecord = 8 << 10 // bytes; ours are below 4 KiB, as an id is at most [pluginwire.MaxID]
)

// Config says where received files are kept.
type Config struct {
	Dir          string       // made if missing, mode 0700; its last component is no symbolic link
	MaxFileBytes int64        // of one file, 0 for no limit
	Logger       *slog.Logger // nil discards
}

// Store is one directory of received files. It is safe for concurrent use. Every
// connection that receives files has its own [Holder]; all see each other's files
// as far as their contexts allow.
type Store struct {
	dir  string
	max  int64
	log  *slog.Logger
	root folder
	id   inode // of root
	own  folder

	life   sync.RWMutex // held for writing by Close only
	closed bool

	publish sync.Mutex // one publication or deletion at a time

	mu   sync.Mutex
	busy map[string]*Holder // by key: what comes
	held map[string]*Holder // by the name of the record: what came
}

// record is what is known of a published file. The names are those of the
// published SDK.
type record struct {
	Claim string             `json:"claim_id"`
	Owner pluginwire.Context `json:"owner"`
	Dev   uint64             `json:"payload_dev"`
	Ino   uint64             `json:"payload_ino"`
}

// Open opens a directory of transfers, and makes it if it must be. If no other
// store of a living process uses it, what is in it was left by a dead one and is
// removed. Errors: Unavailable or Exhausted, where the disk will not.
func Open(cfg Config) (*Store, error) {
	s := &Store{max: cfg.MaxFileBytes, log: cfg.Logger, busy: map[string]*Holder{}, held: map[string]*Holder{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if s.dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, diskError(err, "its path is not known")
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, diskError(err, "it cannot be made")
	}
	if s.root, err = openFolder(s.dir); err != nil {
		return nil, diskError(err, "it cannot be opened, or is a symbolic link")
	}
	if err := s.prepare(); err != nil {
		s.root.close()
		return nil, diskError(err, "it cannot be prepared")
	}
	return s, nil
}

func (s *Store) prepare() (err error) {
	if err := unix.Fchmod(s.root.fd, 0o700); err != nil {
		return err
	}
	if s.id, err = s.root.stat("."); err != nil {
		return err
	}
	// A shared lock says that a store lives, and ends with its process; whoever
	// gets the lock alone may sweep (flock(2)).
	if unix.Flock(s.root.fd, unix.LOCK_EX|unix.LOCK_NB) == nil {
		if err := s.sweep(); err != nil {
			return err
		}
	}
	for {
		if err := unix.Flock(s.root.fd, unix.LOCK_SH); err == nil {
			break
		} else if err != unix.EINTR {
			return err
		}
	}
	s.own, err = s.root.sub(ownersDir, true)
	return err
}

// sweep removes what a dead process left. What this package did not make stays.
func (s *Store) sweep() error {
	removed := 0
	err := s.root.each(func(name string) error {
		if name != ownersDir && name != unbound && !ident.IsDigest(name) {
			return nil
		}
		dir, err := s.root.sub(name, false)
		if err != nil {
			return nil // no directory of ours
		}
		defer dir.close()
		err = dir.each(func(inside string) error {
			err := dir.unlink(inside)
			if err == unix.EISDIR || err == unix.ENOENT || err == unix.EPERM {
				return nil
			}
			removed++
			return err
		})
		s.root.rmdir(name) // fails while something else is inside
		return err
	})
	if removed > 0 {
		s.log.Info("files of transfers that an ended runtime had left were removed", "files", removed, "dir", s.dir)
	}
	return err
}

// Close lets go of the directory. The files of holders that are not closed stay,
// for the sweep of the next [Open].
func (s *Store) Close() error {
	s.life.Lock()
	defer s.life.Unlock()
	if !s.closed {
		s.closed = true
		s.own.close()
		s.root.close() // and with it the lock
	}
	return nil
}

// enter begins a step that uses the directory, and says how to end it. The
// directory must still be the one that was opened.
func (s *Store) enter() (leave func(), err error) {
	s.life.RLock()
	if s.closed {
		s.life.RUnlock()
		return nil, errdefs.New(errdefs.Unavailable, "the transfer directory is closed").WithNext("try again when the runtime is up")
	}
	if now, err := (folder{unix.AT_FDCWD}).stat(s.dir); err != nil || !now.is(s.id) {
		s.life.RUnlock()
		return nil, errdefs.New(errdefs.Unavailable, "the transfer directory was moved or replaced").WithNext("restart the runtime")
	}
	return s.life.RUnlock, nil
}

// OpenFile opens a received file for reading and tells its size in bytes. The
// caller closes it; it can be read to the end even if it is deleted meanwhile.
//
// A file is seen by its owner; for a key made by [NewKey] also by the zero
// context and by the owner's installation without revision and artifact. Errors:
// Invalid (no key, or the file is not the one of its record), NotFound (no such
// file, or another's), Exhausted (larger than MaxFileBytes), Unavailable.
func (s *Store) OpenFile(key string, as pluginwire.Context) (*os.File, int64, error) {
	if err := checkKey(key); err != nil {
		return nil, 0, err
	}
	leave, err := s.enter()
	if err != nil {
		return nil, 0, err
	}
	defer leave()
	file, size, err := s.open(key, as)
	if errdefs.Is(err, errdefs.Invalid) {
		// The key may just have been deleted and used again: look while nobody does.
		s.publish.Lock()
		defer s.publish.Unlock()
		file, size, err = s.open(key, as)
	}
	return file, size, err
}

func (s *Store) open(key string, as pluginwire.Context) (*os.File, int64, error) {
	f, err := s.find(key, as)
	if err != nil {
		return nil, 0, err
	}
	dir, err := s.root.sub(f.space, false)
	if err != nil {
		return nil, 0, missing(err)
	}
	defer dir.close()
	file, id, err := dir.read(key)
	if err != nil {
		return nil, 0, missing(err)
	}
	err = s.fits(id.size)
	if !id.is(f.payload) {
		err = errCapability()
	}
	if err != nil {
		file.Close()
		return nil, 0, err
	}
	return file, id.size, nil
}

// Read is [Store.OpenFile] for files that fit into memory.
func (s *Store) Read(key string, as pluginwire.Context) ([]byte, error) {
	file, size, err := s.OpenFile(key, as)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	b := make([]byte, size)
	if _, err := io.ReadFull(file, b); err != nil {
		return nil, diskError(err, "a received file cannot be read")
	}
	return b, nil
}

func (s *Store) fits(size int64) error {
	if s.max > 0 && size > s.max {
		return errdefs.New(errdefs.Exhausted, "a transferred file is larger than %d bytes", s.max).
			WithNext("send a smaller file, or raise max_file_size_mb of the worker policy").With("limit", "max_file_size_mb")
	}
	return nil
}

// found is a file that somebody may see.
type found struct {
	space, record string
	payload       inode
}

// find looks up a file's record, and says whether as may see it. Everything that
// is not as it must be is not found; a record that cannot be read is.
func (s *Store) find(key string, as pluginwire.Context) (found, error) {
	f := found{space: space(as)}
	f.record = recordName(key, f.space)
	rec, err := s.record(f.record)
	if err != nil {
		return found{}, missing(err)
	}
	if !mayRead(rec.Owner, as) {
		return found{}, errNotFound()
	}
	if isMinted(key) { // else the record was already looked for in as's own space
		f.space = space(rec.Owner)
	}
	f.payload = inode{dev: rec.Dev, ino: rec.Ino}
	return f, nil
}

func (s *Store) record(name string) (record, error) {
	file, id, err := s.own.read(name)
	if err != nil {
		return record{}, err
	}
	defer file.Close()
	if id.size > maxRecord {
		return record{}, errCapability()
	}
	raw, err := io.ReadAll(io.LimitReader(file, maxRecord))
	if err != nil {
		return record{}, err
	}
	var rec record
	if json.Unmarshal(raw, &rec) != nil || rec.Ino == 0 {
		return record{}, errCapability()
	}
	return rec, nil
}

func missing(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return errNotFound()
	}
	return diskError(err, "a received file cannot be opened")
}

// Delete removes a received file. It does nothing if there is none, or none that
// as may see, like [Store.OpenFile]. Errors: Invalid (no key, or the file is not
// the one of its record; then nothing is removed), Unavailable.
func (s *Store) Delete(key string, as pluginwire.Context) error {
	if err := checkKey(key); err != nil {
		return err
	}
	leave, err := s.enter()
	if err != nil {
		return err
	}
	defer leave()
	s.publish.Lock()
	defer s.publish.Unlock()
	f, err := s.find(key, as)
	if err == nil {
		err = s.remove(key, f)
	}
	if errdefs.Is(err, errdefs.NotFound) {
		return nil
	}
	if err != nil {
		return diskError(err, "a received file cannot be deleted")
	}
	return nil
}

// remove takes a file and its record away; publish is held. The file is moved
// aside first, so that what is unlinked is certainly what was looked at.
func (s *Store) remove(key string, f found) error {
	dir, err := s.root.sub(f.space, false)
	switch {
	case err == unix.ENOENT: // half of it went before
	case err != nil:
		return err
	default:
		defer dir.close()
		if err := quarantine(dir, key, f.payload); err != nil && err != unix.ENOENT {
			return err
		}
	}
	if err := s.own.unlink(f.record); err != nil && err != unix.ENOENT {
		return err
	}
	s.root.rmdir(f.space) // fails while something is inside
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.held[f.record]; h != nil {
		h.forgetLocked(h.got[f.record].owner)
		delete(h.got, f.record)
		delete(s.held, f.record)
	}
	return nil
}

func quarantine(dir folder, key string, want inode) error {
	if id, err := dir.stat(key); err != nil {
		return err
	} else if !id.is(want) {
		return errCapability()
	}
	aside := ".quarantine-" + random()
	if err := dir.rename(key, aside); err != nil {
		return err
	}
	if id, err := dir.stat(aside); err != nil || !id.is(want) {
		// Not what it was a moment ago: back to where it stood, without overwriting.
		dir.publish(aside, key)
		return errCapability()
	}
	return dir.unlink(aside)
}

// random is 32 hexadecimal digits.
func random() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
