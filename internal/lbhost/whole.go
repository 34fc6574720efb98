package lbhost

import (
	"encoding/binary"
	"io"
	"net/http"
)

// wholeFrames is a transport whose WebSockets write each frame at once, as LangBot's
// library does. Ours has a buffer of 4 KiB: it would write a piece of a file in six
// parts, each of which may wake the runtime.
type wholeFrames struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (t wholeFrames) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.RoundTripper.RoundTrip(r)
	if err == nil {
		if rwc, ok := resp.Body.(io.ReadWriteCloser); ok {
			resp.Body = &frameWriter{ReadWriteCloser: rwc}
		}
	}
	return resp, err
}

// frameWriter holds the parts of a frame until it is whole; rpc's frames have at most
// pluginwire.WSFragment bytes. One goroutine writes at a time.
type frameWriter struct {
	io.ReadWriteCloser
	buf []byte
}

// Write implements io.Writer. What was held back fails with the write that completes it.
func (w *frameWriter) Write(b []byte) (int, error) {
	w.buf = append(w.buf, b...)
	whole := 0
	for {
		size := frameSize(w.buf[whole:])
		if size == 0 || size > uint64(len(w.buf)-whole) {
			break
		}
		whole += int(size)
	}
	if whole == 0 {
		return len(b), nil
	}
	_, err := w.ReadWriteCloser.Write(w.buf[:whole])
	w.buf = append(w.buf[:0], w.buf[whole:]...)
	return len(b), err
}

// frameSize is the size of the frame that begins with b, 0 while b does not tell it
// (RFC 6455, 5.2).
func frameSize(b []byte) uint64 {
	if len(b) < 2 {
		return 0
	}
	head, length := uint64(2), uint64(b[1]&0x7f)
	if b[1]&0x80 != 0 {
		head += 4 // the mask
	}
	switch {
	case length == 126 && len(b) >= 4:
		return head + 2 + uint64(binary.BigEndian.Uint16(b[2:]))
	case length == 127 && len(b) >= 10:
		return head + 8 + binary.BigEndian.Uint64(b[2:])
	case length > 125:
		return 0
	}
	return head + length
}
