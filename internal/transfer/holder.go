package transfer

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Holder is the receiving side of one connection: what comes, and what came and is
// not deleted. It is safe for concurrent use; one chunk is handled at a time.
type Holder struct {
	store *Store
	admit func(from pluginwire.Context) error

	mu     sync.Mutex // held while a chunk is handled
	closed bool
	coming map[string]*incoming // by key
	buf    []byte               // of a chunk, while something comes: most holders wait

	got map[string]held            // by the name of the record; guarded by store.mu
	own map[pluginwire.Context]int // files by owner, coming and got; guarded by store.mu
}

type held struct {
	key   string
	owner pluginwire.Context
	found found
	at    time.Time // when it had come
}

// incoming is a file of which not all chunks have come.
type incoming struct {
	owner        pluginwire.Context
	space        string
	stage        string // its name in the space
	file         *os.File
	id           inode
	next, amount int64
	size         int64
	at           time.Time // of its last chunk
}

// Holder returns the receiving side of a connection. admit is asked for every chunk
// whether its context may send files here, such as whether a binding is a
// candidate or a registration still lives; its error is returned to the peer, and
// a file of that context that is coming is dropped. It may be nil.
func (s *Store) Holder(admit func(from pluginwire.Context) error) *Holder {
	return &Holder{store: s, admit: admit, coming: map[string]*incoming{}, got: map[string]held{}, own: map[pluginwire.Context]int{}}
}

// Chunk handles the data of one __file_chunk whose effective context is from. The
// chunks of a file come in order, each once, with one amount and one context; the
// file is there when the last came. Whatever came of a file is removed again when
// a chunk cannot be written.
//
// Errors: Invalid (the data is no chunk; not the next one; the key is taken),
// Exhausted (larger than MaxFileBytes, more than [MaxHeld] files of the owner or
// [MaxOfAll] of all, disk full),
// Unavailable, and those of admit.
func (h *Holder) Chunk(data json.RawMessage, from pluginwire.Context) error {
	c, err := decodeChunk(data)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.admit != nil { // with the lock: whoever revokes and then sweeps misses nothing
		err = h.admit(from)
	}
	in := h.coming[c.key]
	if err != nil {
		if in != nil && in.owner == from {
			h.drop(c.key, in)
		}
		return err
	}
	if h.closed {
		return errdefs.New(errdefs.Unavailable, "the connection is closed").WithNext("connect again")
	}
	if h.buf == nil {
		h.buf = make([]byte, ChunkBytes+2) // the decoder may write up to two bytes of padding
	}
	defer func() {
		if len(h.coming) == 0 {
			h.buf = nil
		}
	}()
	n, err := c.decode(h.buf)
	if err != nil {
		return err
	}
	leave, err := h.store.enter()
	if err != nil {
		return err
	}
	defer leave()
	switch {
	case c.index == 0 && in == nil:
		if in, err = h.begin(c, from); err != nil {
			return err
		}
	case in == nil || in.owner != from || in.amount != c.amount || in.next != c.index:
		return errCapability()
	}
	if err := h.write(c.key, in, h.buf[:n]); err != nil {
		h.drop(c.key, in)
		return diskError(err, "a file that came was dropped")
	}
	return nil
}

// begin makes the file for a first chunk.
func (h *Holder) begin(c chunk, from pluginwire.Context) (*incoming, error) {
	s := h.store
	in := &incoming{owner: from, space: space(from), stage: ".payload-" + random() + ".tmp", amount: c.amount}
	h.dropStalled(from)
	if err := h.reserve(c.key, from); err != nil {
		return nil, err
	}
	err := s.free(c.key, in.space)
	if err == nil {
		// A space that was empty may just have been removed by a deletion.
		for range 10 {
			var dir folder
			if dir, err = s.root.sub(in.space, true); err == nil {
				in.file, err = dir.create(in.stage)
				dir.close()
			}
			if err != unix.ENOENT {
				break
			}
		}
	}
	if err == nil {
		if in.id, err = identify(in.file); err != nil {
			h.coming[c.key] = in
			h.drop(c.key, in)
			return nil, diskError(err, "a file that came was dropped")
		}
		h.coming[c.key] = in
		return in, nil
	}
	s.mu.Lock()
	delete(s.busy, c.key)
	h.forgetLocked(from)
	s.mu.Unlock()
	return nil, diskError(err, "no file can be received")
}

// dropStalled makes room where there is none: a sender that has given up says nothing,
// be it in the middle of a file or before it asked for anything about a whole one, and
// its connection may live for weeks.
func (h *Holder) dropStalled(from pluginwire.Context) {
	h.store.mu.Lock()
	err := h.roomLocked(from)
	h.store.mu.Unlock()
	if err == nil {
		return
	}
	for key, in := range h.coming {
		if time.Since(in.at) >= Stalled {
			h.drop(key, in)
		}
	}
	s := h.store
	s.publish.Lock()
	defer s.publish.Unlock()
	s.mu.Lock()
	old := slices.Collect(maps.Values(h.got))
	s.mu.Unlock()
	// What cannot be deleted goes on taking its place, and the caller is told so.
	_ = s.removeAll(slices.DeleteFunc(old, func(f held) bool { return time.Since(f.at) < Unclaimed }))
}

// roomLocked reports whether one more file of an owner may come; store.mu is held.
func (h *Holder) roomLocked(from pluginwire.Context) error {
	switch {
	case h.own[from] >= MaxHeld:
		return errdefs.New(errdefs.Exhausted, "Active file transfer capacity reached: the connection holds %d files of this owner", MaxHeld).
			WithNext("read and delete received files first").With("limit", "files of an owner")
	case len(h.coming)+len(h.got) >= MaxOfAll:
		return errdefs.New(errdefs.Exhausted, "Active file transfer capacity reached: the connection holds %d files", MaxOfAll).
			WithNext("read and delete received files first").With("limit", "files of a connection")
	}
	return nil
}

// forgetLocked ends the count of one file; store.mu is held.
func (h *Holder) forgetLocked(owner pluginwire.Context) {
	if h.own[owner]--; h.own[owner] == 0 {
		delete(h.own, owner)
	}
}

// reserve takes the key for this holder, if it may have one more.
func (h *Holder) reserve(key string, from pluginwire.Context) error {
	s := h.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy[key] != nil {
		return errCapability()
	}
	if err := h.roomLocked(from); err != nil {
		return err
	}
	s.busy[key] = h
	h.own[from]++
	return nil
}

// free says whether a key is not taken. It is asked again, by the file system, at the end.
func (s *Store) free(key, space string) error {
	if _, err := s.own.stat(recordName(key, space)); err == nil {
		return errCapability()
	} else if err != unix.ENOENT {
		return err
	}
	dir, err := s.root.sub(space, false)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.close()
	if _, err := dir.stat(key); err == nil {
		return errCapability()
	} else if err != unix.ENOENT {
		return err
	}
	return nil
}

func (h *Holder) write(key string, in *incoming, b []byte) error {
	if err := h.store.fits(in.size + int64(len(b))); err != nil {
		return err
	}
	if _, err := in.file.Write(b); err != nil {
		return err
	}
	in.size, in.at = in.size+int64(len(b)), time.Now()
	if in.next++; in.next < in.amount {
		return nil
	}
	return h.finish(key, in)
}

// finish makes a file that came visible under its key.
func (h *Holder) finish(key string, in *incoming) error {
	s := h.store
	err := in.file.Close()
	in.file = nil
	if err != nil {
		return err
	}
	s.publish.Lock()
	defer s.publish.Unlock()
	dir, err := s.root.sub(in.space, false)
	if err != nil {
		return err
	}
	defer dir.close()
	if err := dir.publish(in.stage, key); err == unix.EEXIST {
		return errCapability()
	} else if err != nil {
		return err
	}
	f := found{in.space, recordName(key, in.space), in.id}
	id, err := dir.stat(key)
	if err == nil && (!id.is(in.id) || !id.regular) {
		err = errCapability() // the stage was swapped
	}
	if err == nil {
		err = s.writeRecord(f.record, record{Claim: random(), Owner: in.owner, Dev: in.id.dev, Ino: in.id.ino})
	}
	if err != nil {
		return errors.Join(err, dir.unlink(key)) // the name is ours: publish made it
	}
	delete(h.coming, key)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.busy, key)
	h.got[f.record] = held{key, in.owner, f, time.Now()}
	s.held[f.record] = h
	return nil
}

// writeRecord publishes an owner's record, whole and without overwriting.
func (s *Store) writeRecord(name string, rec record) error {
	raw, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	tmp := ".record-" + random() + ".tmp"
	file, err := s.own.create(tmp)
	if err != nil {
		return err
	}
	_, err = file.Write(raw)
	if err = errors.Join(err, file.Close()); err == nil {
		if err = s.own.publish(tmp, name); err == nil {
			return nil
		}
	}
	s.own.unlink(tmp)
	if err == unix.EEXIST {
		return errCapability()
	}
	return err
}

// drop removes what came of a file. h.mu is held.
func (h *Holder) drop(key string, in *incoming) {
	s := h.store
	if in.file != nil {
		in.file.Close()
		in.file = nil
	}
	if dir, err := s.root.sub(in.space, false); err == nil {
		dir.unlink(in.stage)
		dir.close()
		s.root.rmdir(in.space)
	}
	delete(h.coming, key)
	s.mu.Lock()
	delete(s.busy, key)
	h.forgetLocked(in.owner)
	s.mu.Unlock()
}

// Close ends the receiving side: what comes is dropped, and what came and was not
// deleted is deleted. It may be called more than once. The error tells what could
// not be deleted; the next [Open] sweeps it.
func (h *Holder) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	s := h.store
	leave, err := s.enter()
	if err != nil {
		for _, in := range h.coming {
			in.file.Close()
		}
		clear(h.coming)
		return err
	}
	defer leave()
	for key, in := range h.coming {
		h.drop(key, in)
	}
	s.publish.Lock()
	defer s.publish.Unlock()
	s.mu.Lock()
	left := slices.Collect(maps.Values(h.got))
	s.mu.Unlock()
	return s.removeAll(left)
}

// Sweep removes what came, or is coming, from contexts that admit refuses now: of a
// binding that was revoked, while its connection lives on. Whoever revokes calls it.
// The error tells what could not be deleted.
func (h *Holder) Sweep() error {
	if h.admit == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.store
	leave, err := s.enter()
	if err != nil {
		return err
	}
	defer leave()
	for key, in := range h.coming {
		if h.admit(in.owner) != nil {
			h.drop(key, in)
		}
	}
	s.publish.Lock()
	defer s.publish.Unlock()
	s.mu.Lock()
	got := slices.Collect(maps.Values(h.got))
	s.mu.Unlock()
	return s.removeAll(slices.DeleteFunc(got, func(f held) bool { return h.admit(f.owner) == nil }))
}

// removeAll deletes received files. s.publish is held.
func (s *Store) removeAll(files []held) error {
	var errs []error
	for _, f := range files {
		if err := s.remove(f.key, f.found); err != nil {
			errs = append(errs, diskError(err, "a received file cannot be deleted"))
		}
	}
	return errors.Join(errs...)
}

// Held tells how many files come or came and are not deleted, at most [MaxOfAll].
func (h *Holder) Held() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.store.mu.Lock()
	defer h.store.mu.Unlock()
	return len(h.coming) + len(h.got)
}

// chunk is the data of a __file_chunk. What else is in it is not looked at, as by
// the published peers: file_length and chunk_size.
type chunk struct {
	key           string
	index, amount int64
	text          []byte // base64; a part of the message
}

func decodeChunk(data json.RawMessage) (c chunk, err error) {
	var key, text, index, amount json.RawMessage
	if err := pluginwire.Members(data, func(name []byte, value json.RawMessage) {
		switch string(name) { // of two with one name the last counts
		case "file_key":
			key = value
		case "chunk_base64":
			text = value
		case "chunk_index":
			index = value
		case "chunk_amount":
			amount = value
		}
	}); err != nil {
		return chunk{}, err
	}
	for _, member := range []struct {
		name  string
		value json.RawMessage
	}{{"file_key", key}, {"chunk_base64", text}, {"chunk_index", index}, {"chunk_amount", amount}} {
		if member.value == nil {
			return chunk{}, pluginwire.MissingKey(member.name)
		}
	}
	var ok bool
	if c.key, ok = plain(key); !ok {
		return chunk{}, checkKey("")
	}
	if err := checkKey(c.key); err != nil {
		return chunk{}, err
	}
	var okIndex, okAmount bool
	c.index, okIndex = integer(index)
	c.amount, okAmount = integer(amount)
	if !okIndex || !okAmount || c.index < 0 || c.index >= c.amount {
		return chunk{}, errdefs.New(errdefs.Invalid, "chunk_index and chunk_amount are not whole numbers with 0 <= index < amount")
	}
	if len(text) < 2 || text[0] != '"' {
		return chunk{}, errBase64()
	}
	c.text = text[1 : len(text)-1]
	if bytes.IndexByte(c.text, '\\') >= 0 { // a slash may be escaped
		var s string
		if json.Unmarshal(text, &s) != nil {
			return chunk{}, errBase64()
		}
		c.text = []byte(s)
	}
	return c, nil
}

// plain is a JSON string; one with an escape is no key.
func plain(raw json.RawMessage) (string, bool) {
	if len(raw) < 2 || raw[0] != '"' || bytes.IndexByte(raw, '\\') >= 0 {
		return "", false
	}
	return string(raw[1 : len(raw)-1]), true
}

// integer is a JSON number without a fraction; not true, not a string.
func integer(raw json.RawMessage) (int64, bool) {
	n, err := strconv.ParseInt(string(raw), 10, 64)
	return n, err == nil
}

func errBase64() error {
	return errdefs.New(errdefs.Invalid, "chunk_base64 is not base64 of at most %d bytes", ChunkBytes)
}

// decode writes the bytes of the chunk to dst and tells how many. Only the standard
// alphabet is taken, with its padding and without line ends.
func (c chunk) decode(dst []byte) (int, error) {
	if len(c.text) > chunkText || bytes.IndexByte(c.text, '\n') >= 0 || bytes.IndexByte(c.text, '\r') >= 0 {
		return 0, errBase64()
	}
	n, err := base64.StdEncoding.Decode(dst, c.text)
	if err != nil || n > ChunkBytes {
		return 0, errBase64()
	}
	return n, nil
}
