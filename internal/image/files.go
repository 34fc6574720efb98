package image

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// document reads a small file of an archive, which may hold links.
func document(dir, name string) ([]byte, error) {
	f, err := os.OpenInRoot(dir, name)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the image archive lacks the file %s", clip(name)).
			WithNext("the archive is incomplete; make it again")
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxMetadata+1))
	if err == nil && len(b) > maxMetadata {
		err = errdefs.New(errdefs.Exhausted, "a document of the image has more than %d bytes, the limit", maxMetadata)
	}
	return b, err
}

// layerFile opens a layer and decompresses it by what its first bytes say: media
// types are not always right, and docker-save archives have none.
func layerFile(dir, file string) opener {
	return func() (io.ReadCloser, error) {
		f, err := os.OpenInRoot(dir, file)
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Invalid, "the image archive lacks the layer %s", clip(file)).
				WithNext("the archive is incomplete; make it again")
		}
		r, stop, err := decompress(f)
		if err != nil {
			f.Close()
			return nil, err
		}
		return readCloser{r, f, stop}, nil
	}
}

// maxWindow bounds the memory that a zstd frame may ask for: the 8 MiB that
// RFC 8878 section 3.1.1.1.2 asks every decoder to support, and some room.
const maxWindow = 64 << 20

// decompress looks at the first bytes. stop gives back what decompressing holds.
func decompress(r io.Reader) (_ *bufio.Reader, stop func(), _ error) {
	br := bufio.NewReaderSize(r, 64<<10)
	head, _ := br.Peek(4)
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}): // RFC 1952
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, nil, errdefs.Wrap(err, errdefs.Invalid, "the archive's gzip compression is damaged")
		}
		return bufio.NewReaderSize(z, 64<<10), func() {}, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}): // RFC 8878
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, nil, errdefs.Wrap(err, errdefs.Invalid, "the archive's zstd compression is damaged")
		}
		return bufio.NewReaderSize(z, 64<<10), z.Close, nil
	}
	return br, func() {}, nil
}

type readCloser struct {
	io.Reader
	file *os.File
	stop func()
}

func (r readCloser) Close() error {
	r.stop()
	return r.file.Close()
}
