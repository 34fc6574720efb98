package client_test

import (
	"bytes"
	"context"
	"io"
	"net/http/httptest"
	"testing"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/httpapi"
	"github.com/stockade-run/stockade/internal/wire"
)

// endless gives the same batch again and again, as a broker that costs nothing.
type endless struct {
	batch []byte
	size  int64
	left  int
	at    int64
}

func (e *endless) Next() ([]byte, error) {
	if e.left == 0 {
		return nil, io.EOF
	}
	e.left--
	if e.left == 0 {
		return pack(wire.KindStatus, 0, 0, []byte(`{"eof":true}`)), nil
	}
	// The header alone changes; the payload's sum stays.
	h, _ := wire.ParseHeader(e.batch)
	h.Cursor, h.Offset = e.at, e.at
	wire.AppendHeader(e.batch[:0], h)
	e.at += e.size
	return e.batch, nil
}

func (e *endless) Close() error { return nil }

// BenchmarkFollow measures the API's and the client's own share of reading a
// log: no broker, no host, no disk.
func BenchmarkFollow(b *testing.B) {
	for name, size := range map[string]int{"64KiB": 64 << 10, "1MiB": 1 << 20} {
		b.Run(name, func(b *testing.B) {
			w := newWorld()
			h, err := httpapi.New(httpapi.Config{Broker: w, Boxes: boxes{}, Tenants: tenants{},
				Stream: func(context.Context, authz.Principal, string, httpapi.StreamQuery) (httpapi.LogStream, error) {
					return &endless{batch: pack(wire.KindStdout, 0, 0, bytes.Repeat([]byte("x"), size)), size: int64(size), left: b.N + 1}, nil
				}})
			if err != nil {
				b.Fatal(err)
			}
			srv := httptest.NewServer(h)
			defer srv.Close()
			c, err := client.New(client.Config{URL: srv.URL, Key: "run"})
			if err != nil {
				b.Fatal(err)
			}
			defer c.CloseIdle()
			b.SetBytes(int64(size))
			done, err := c.Process("proc_aaaaaaaaaaaaaaaaaaaaaaaaaa").Copy(b.Context(), io.Discard, nil, client.OutputOptions{})
			if err != nil || done.Stdout != int64(b.N)*int64(size) {
				b.Fatalf("%d bytes, %v", done.Stdout, err)
			}
		})
	}
}
