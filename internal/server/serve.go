package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/stockade-run/stockade/internal/httpapi"
	"github.com/stockade-run/stockade/internal/lockdir"
	"github.com/stockade-run/stockade/internal/secret"
)

// apiServer is the HTTP server of one Run, with or without a broker behind it.
type apiServer struct {
	state   *lockdir.Dir
	handler *httpapi.Handler
	options Options
	log     *slog.Logger
	drain   time.Duration // for answers under way when it stops
}

// serve answers on l until ctx ends or serving fails. When it answers it calls
// ready, then tells the address to whoever wants to know. Before it returns, no
// request is under way any more.
func (s *apiServer) serve(ctx context.Context, l net.Listener, ready func()) (err error) {
	url := "http://" + l.Addr().String()
	if err := secret.WriteFile0600(s.state.File(AddressFile), []byte(url+"\n")); err != nil {
		s.log.Warn("the address file cannot be written; commands need --url", "err", err)
	}
	defer os.Remove(s.state.File(AddressFile))
	srv := &http.Server{
		Handler: s.handler, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), ConnContext: wideSocket,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	ready()
	s.log.Info("serving", "url", url, "state", s.state.Path, "version", s.options.Version)
	if s.options.Ready != nil {
		s.options.Ready(url)
	}
	select {
	case <-ctx.Done():
	case err = <-served:
		served <- err
	}
	s.log.Info("stopping")
	if errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.drain)
	defer cancel()
	s.handler.Shutdown(drain) // ends streams and sockets, which Shutdown below does not
	if srv.Shutdown(drain) != nil {
		srv.Close()
	}
	if serr := <-served; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	return err
}

// socketBuffer lets a log stream hand over large pieces at once; it is a bound,
// not memory taken (tcp(7)).
const socketBuffer = 2 << 20

func wideSocket(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetWriteBuffer(socketBuffer) // slower without, not wrong
	}
	return ctx
}
