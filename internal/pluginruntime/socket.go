package pluginruntime

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
)

// socketBuffer holds a whole piece of a file, 16 KiB in base64 with its envelope: read
// and written in one system call each. The library's own 4 KiB make six of it, each of
// which may wake the peer.
const socketBuffer = 32 << 10

// roomy gives a connection that is taken over larger buffers.
type roomy struct{ http.ResponseWriter }

// Hijack implements http.Hijacker.
func (r roomy) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := http.NewResponseController(r.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	ahead, err := rw.Reader.Peek(rw.Reader.Buffered()) // as much as is there: it cannot fail
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	in := bufio.NewReaderSize(io.MultiReader(bytes.NewReader(bytes.Clone(ahead)), c), socketBuffer)
	// The library keeps what is buffered here and reads on from the connection: what the
	// peer sent with its request must be in the buffer, not before it.
	if _, err := in.Peek(len(ahead)); err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	return c, bufio.NewReadWriter(in, bufio.NewWriterSize(c, socketBuffer)), nil
}
