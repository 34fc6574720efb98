package demo

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"sync"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// readWait is how long one read waits for output.
const readWait = 20 * time.Second

// follower reads the output of a process from its first byte to its last. It
// checks that every record begins where the one before it on the same stream
// ended, counts, and digests standard output. Its Read gives out standard output
// in order; nothing is read ahead of it by more than one answer of the server.
type follower struct {
	p  *client.Process
	pr *io.PipeReader
	pw *io.PipeWriter

	mu     sync.Mutex
	cursor string
	offset map[string]int64 // next byte per stream
	sum    hash.Hash
	stderr []byte // its last maxStderr bytes
	done   chan struct{}
	err    error
}

// maxStderr bounds what of the error output is kept to be shown.
const maxStderr = 4 << 10

// follow begins to read. The caller reads to the end or calls stop.
func follow(ctx context.Context, p *client.Process) *follower {
	f := &follower{p: p, offset: map[string]int64{}, sum: sha256.New(), done: make(chan struct{})}
	f.pr, f.pw = io.Pipe()
	go func() {
		defer close(f.done)
		err := f.loop(ctx)
		f.mu.Lock()
		f.err = err
		f.mu.Unlock()
		f.pw.CloseWithError(err) // io.EOF if nil
	}()
	return f
}

// Read gives out standard output.
func (f *follower) Read(b []byte) (int, error) { return f.pr.Read(b) }

// stop ends the reading, if it has not ended, and waits for that.
func (f *follower) stop() {
	f.pr.CloseWithError(io.ErrClosedPipe)
	<-f.done
}

func (f *follower) loop(ctx context.Context) error {
	for {
		r, err := f.p.Read(ctx, client.ReadOptions{Cursor: f.cursor, Wait: readWait, Ack: f.cursor != ""})
		if err != nil {
			return err
		}
		if r.Gap != nil {
			return errdefs.New(errdefs.Internal, "%d bytes of the output are missing, from %s to %s", r.Gap.Bytes, r.Gap.From, r.Gap.To)
		}
		for _, rec := range r.Records {
			if err := f.take(rec); err != nil {
				return err
			}
		}
		f.mu.Lock()
		f.cursor = r.Next
		f.mu.Unlock()
		if r.EOF {
			return nil
		}
	}
}

func (f *follower) take(rec client.Record) error {
	f.mu.Lock()
	want := f.offset[rec.Stream]
	f.offset[rec.Stream] += int64(len(rec.Data))
	if rec.Stream == "stdout" {
		f.sum.Write(rec.Data)
	} else {
		f.stderr = append(f.stderr, rec.Data...)
		f.stderr = f.stderr[max(0, len(f.stderr)-maxStderr):]
	}
	f.mu.Unlock()
	if rec.Offset != want {
		return errdefs.New(errdefs.Internal, "a record of %s begins at byte %d, the one before it ended at %d", rec.Stream, rec.Offset, want)
	}
	if rec.Stream != "stdout" {
		return nil
	}
	_, err := f.pw.Write(rec.Data)
	return err
}

// read returns how much of standard output was read, and of both outputs.
func (f *follower) read() (stdout, all int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.offset["stdout"], f.offset["stdout"] + f.offset["stderr"]
}

// digest is the digest of all standard output that was read.
func (f *follower) digest() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return hex.EncodeToString(f.sum.Sum(nil))
}

// errors is the end of the error output.
func (f *follower) errors() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return string(f.stderr)
}

// command runs a command line in the box and returns its output; one that exits
// with anything but 0 is an error.
func (s *story) command(ctx context.Context, name, line string) (string, error) {
	p, err := s.task.Open(ctx, client.OpenRequest{RequestID: "demo-" + name, Argv: []string{"sh", "-c", line}})
	if err != nil {
		return "", err
	}
	f := follow(ctx, p)
	defer f.stop()
	out, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return "", err
	}
	exit, err := p.Wait(ctx)
	if err != nil {
		return "", err
	}
	if exit.Kind != client.ExitExited || exit.Code == nil || *exit.Code != 0 {
		return string(out), errdefs.New(errdefs.Internal, "%s: %s\n%s%s", line, exitText(exit), out, f.errors())
	}
	return string(out), nil
}

// exitText says for people how a process ended.
func exitText(e client.Exit) string {
	text := string(e.Kind)
	switch {
	case e.Code != nil:
		text = fmt.Sprintf("exited with %d", *e.Code)
	case e.Signal != "":
		text = fmt.Sprintf("ended by %s", e.Signal)
	}
	if e.Detail != "" {
		text += " (" + e.Detail + ")"
	}
	return text
}
