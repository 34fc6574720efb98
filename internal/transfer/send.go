package transfer

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"strconv"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// Caller is a connection to the peer that receives: an [rpc.Conn].
type Caller interface {
	Call(ctx context.Context, action string, data any, o rpc.CallOptions) (json.RawMessage, error)
}

// Send pushes data to the peer under a new key and returns the key, which the
// caller then names in a message. It returns when the peer has the whole file;
// after an error the peer has none of it, or will drop what it has with the
// connection. Errors: Invalid (extension), and those of the connection.
func Send(ctx context.Context, to Caller, data []byte, ext string, from pluginwire.Context) (key string, err error) {
	return SendFrom(ctx, to, bytes.NewReader(data), int64(len(data)), ext, from)
}

// SendFrom is [Send] of the next size bytes of r, of which it holds one chunk in
// memory at a time. Further errors: those of r, io.ErrUnexpectedEOF if it has less.
func SendFrom(ctx context.Context, to Caller, r io.Reader, size int64, ext string, from pluginwire.Context) (key string, err error) {
	if size < 0 {
		return "", errdefs.New(errdefs.Invalid, "a file cannot have %d bytes", size)
	}
	if key, err = NewKey(ext); err != nil {
		return "", err
	}
	amount := max(1, (size+ChunkBytes-1)/ChunkBytes) // an empty file is one empty chunk
	head := []byte(`{"file_key":"` + key + `","file_length":` + strconv.FormatInt(size, 10) + `,"chunk_amount":` + strconv.FormatInt(amount, 10))
	message := make([]byte, 0, len(head)+base64.StdEncoding.EncodedLen(ChunkBytes)+96)
	buf := make([]byte, min(size, ChunkBytes))
	for i := range amount {
		part := buf[:min(ChunkBytes, size-i*ChunkBytes)]
		if _, err := io.ReadFull(r, part); err == io.EOF {
			return "", io.ErrUnexpectedEOF
		} else if err != nil {
			return "", err
		}
		message = append(message[:0], head...)
		message = strconv.AppendInt(append(message, `,"chunk_index":`...), i, 10)
		message = strconv.AppendInt(append(message, `,"chunk_size":`...), int64(len(part)), 10)
		message = base64.StdEncoding.AppendEncode(append(message, `,"chunk_base64":"`...), part)
		message = append(message, `"}`...)
		if _, err := to.Call(ctx, pluginwire.ActionFileChunk, json.RawMessage(message), rpc.CallOptions{Context: from}); err != nil {
			return "", err
		}
	}
	return key, nil
}

// Send is the function [Send] within the store's limit for one file, for a peer
// that is held to the same. Further errors: Exhausted.
func (s *Store) Send(ctx context.Context, to Caller, data []byte, ext string, from pluginwire.Context) (key string, err error) {
	if err := s.fits(int64(len(data))); err != nil {
		return "", err
	}
	return Send(ctx, to, data, ext, from)
}
