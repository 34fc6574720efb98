package gateway

import (
	"bytes"
	"io"
)

// redactor copies a body and overwrites every occurrence of the key with as many
// asterisks, so that no length changes. It never waits for more input than it
// needs: only bytes that could be the beginning of the key are kept back until
// the next read, which for a text stream that ends its chunks with a line break
// is nothing.
type redactor struct {
	src  io.Reader
	key  []byte
	held []byte // read, not yet given out: at most what one Read brought plus len(key)-1
	out  int    // bytes of held that may be given out
	err  error
}

// newRedactor returns src itself if there is no key to look for.
func newRedactor(src io.Reader, key string) io.Reader {
	if key == "" {
		return src
	}
	return &redactor{src: src, key: []byte(key)}
}

func (r *redactor) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for r.out == 0 {
		if r.err != nil {
			if len(r.held) == 0 {
				return 0, r.err
			}
			r.out = len(r.held)
			break
		}
		n, err := r.src.Read(p)
		r.held = append(r.held, p[:n]...)
		r.err = err
		for {
			i := bytes.Index(r.held, r.key)
			if i < 0 {
				break
			}
			copy(r.held[i:], bytes.Repeat([]byte{'*'}, len(r.key)))
		}
		r.out = len(r.held) - prefixAtEnd(r.held, r.key)
		if n == 0 && err == nil {
			return 0, nil
		}
	}
	n := copy(p, r.held[:r.out])
	r.held = r.held[:copy(r.held, r.held[n:])]
	r.out -= n
	return n, nil
}

// prefixAtEnd returns the length of the longest end of b that is a beginning of
// key, shorter than key.
func prefixAtEnd(b, key []byte) int {
	for n := min(len(b), len(key)-1); n > 0; n-- {
		if bytes.HasSuffix(b, key[:n]) {
			return n
		}
	}
	return 0
}
