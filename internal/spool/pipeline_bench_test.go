package spool

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/wire"
)

// BenchmarkPipeline is the whole way of a stream but for HTTP: a child process,
// its pipe, the log, a reader, a Unix socket. The baseline leaves out log and
// reader: pipe to socket.
func BenchmarkPipeline(b *testing.B) {
	const total, chunk = 256 << 20, 256 << 10
	for _, logged := range []bool{false, true} {
		name := map[bool]string{false: "baseline", true: "log"}[logged]
		b.Run(name, func(b *testing.B) {
			b.SetBytes(total)
			for b.Loop() {
				pr, pw, err := os.Pipe()
				if err != nil {
					b.Fatal(err)
				}
				_, _ = unix.FcntlInt(pr.Fd(), unix.F_SETPIPE_SZ, 1<<20)
				cmd := exec.Command("head", "-c", fmt.Sprint(total), "/dev/zero")
				cmd.Stdout = pw
				if err := cmd.Start(); err != nil {
					b.Fatal(err)
				}
				_ = pw.Close()
				from, to := socketPair(b)
				var wg sync.WaitGroup
				wg.Go(func() { _, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, from, make([]byte, chunk)) })
				if logged {
					throughLog(b, &wg, pr, to, total, chunk)
				} else {
					_, _ = io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{pr}, make([]byte, chunk))
				}
				_ = to.Close()
				wg.Wait()
				_ = from.Close()
				_ = pr.Close()
				if err := cmd.Wait(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func throughLog(b *testing.B, wg *sync.WaitGroup, from io.Reader, to io.Writer, total int64, chunk int) {
	dir := b.TempDir()
	w := newWriter(b, Config{Dir: dir})
	wg.Go(func() {
		buf := make([]byte, chunk)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				if err := w.Append(context.Background(), wire.KindStdout, buf[:n]); err != nil {
					b.Error(err)
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	r := newReader(b, dir)
	buf := make([]byte, BufSize(chunk))
	for cursor := int64(0); cursor < total; {
		changed := w.Changed()
		limit := w.State().Next
		if limit == cursor {
			<-changed
			continue
		}
		frames, next, gap, err := r.Read(cursor, chunk, limit, buf)
		if err != nil || gap != nil {
			b.Fatal(gap, err)
		}
		if _, err := to.Write(frames); err != nil {
			b.Fatal(err)
		}
		cursor = next
		if err := w.Ack(cursor); err != nil {
			b.Fatal(err)
		}
	}
}

func socketPair(b *testing.B) (net.Conn, net.Conn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		if conns[i], err = net.FileConn(f); err != nil {
			b.Fatal(err)
		}
		_ = f.Close()
	}
	return conns[0], conns[1]
}
