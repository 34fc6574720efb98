package tartree

import (
	"archive/tar"
	"io"
)

// Reader is a tar.Reader for archives that must be whole. tar.Reader takes the end of
// the stream for the end of the archive when it comes between two entries, so that what
// a producer wrote before it died looks like all; here that is io.ErrUnexpectedEOF.
type Reader struct {
	*tar.Reader
	in *drained
}

// NewReader returns a reader of the archive in r.
func NewReader(r io.Reader) *Reader {
	in := &drained{r: r}
	return &Reader{tar.NewReader(in), in}
}

// Next is that of tar.Reader; io.EOF means that the end marker was read.
func (r *Reader) Next() (*tar.Header, error) {
	h, err := r.Reader.Next()
	if err == io.EOF && r.in.over {
		return nil, io.ErrUnexpectedEOF
	}
	return h, err
}

// drained notes that more was asked for than there was.
type drained struct {
	r    io.Reader
	over bool
}

func (d *drained) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	d.over = d.over || n == 0 && err == io.EOF
	return n, err
}
