package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// Body limits of the server half, in bytes.
const (
	maxSmallBody = 64 << 10
	// MaxStdinBody is the most input one WriteStdin carries.
	MaxStdinBody = 1 << 20
)

// request is one admitted request.
type request struct {
	*http.Request
	w          http.ResponseWriter
	control    *http.ResponseController
	generation int64
}

// handle adapts a handler that returns an error.
func (s *server) handle(f func(ctx context.Context, r *request) error) http.Handler {
	return s.admit(true, f)
}

func (s *server) admit(needGeneration bool, f func(ctx context.Context, r *request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, hr *http.Request) {
		r := &request{Request: hr, w: w, control: http.NewResponseController(w)}
		s.handlers.Add(1)
		defer s.handlers.Done()
		err := s.guarded(needGeneration, r, f)
		if err != nil {
			s.fail(r, err)
		}
	})
}

func (s *server) guarded(needGeneration bool, r *request, f func(ctx context.Context, r *request) error) error {
	header := r.Header.Get(wire.GenerationHeader)
	if header == "" && !needGeneration {
		return f(r.Context(), r)
	}
	generation, err := strconv.ParseInt(header, 10, 64)
	if err != nil || generation < 1 || generation > api.MaxOffset {
		return errdefs.New(errdefs.Invalid, "the request carries no server generation").
			WithNext("send the header %s", wire.GenerationHeader)
	}
	ctx, release, err := s.gate.admit(r.Context(), generation)
	if err != nil {
		return err
	}
	defer release()
	r.generation = generation
	return f(ctx, r)
}

// fail answers with a problem. Faults are logged, refusals are the caller's business.
func (s *server) fail(r *request, err error) {
	if errors.Is(err, http.ErrAbortHandler) {
		panic(http.ErrAbortHandler) // breaks the connection: the answer had begun
	}
	ref := strconv.FormatInt(time.Now().UnixNano(), 36)
	p := api.ProblemOf(err, ref)
	if p.Code == errdefs.Internal {
		s.log.Error("request failed", "method", r.Method, "path", r.URL.Path, "ref", ref, "error", err, "cause", errors.Unwrap(err))
	}
	b, merr := json.Marshal(p)
	if merr != nil {
		b = []byte(`{"code":"internal"}`)
	}
	// A caller that is still sending would see a broken connection instead of the
	// answer: it is sent first, and what comes after it is thrown away for a while.
	_ = r.control.EnableFullDuplex()
	r.w.Header().Set("Content-Type", api.ProblemType)
	r.w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	r.w.WriteHeader(p.Status)
	if _, err := r.w.Write(b); err != nil || r.Body == http.NoBody || r.control.Flush() != nil {
		return
	}
	_ = r.control.SetReadDeadline(time.Now().Add(refusedTime))
	_, _ = io.CopyN(io.Discard, r.Body, refusedBytes)
}

// Bounds of what is still taken of a body that was refused.
const (
	refusedTime  = 3 * time.Second
	refusedBytes = 64 << 20
)

// answer sends v as JSON.
func (r *request) answer(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "an answer could not be encoded: %v", err)
	}
	r.w.Header().Set("Content-Type", "application/json")
	r.w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, _ = r.w.Write(b) // a caller that left is no error of ours
	return nil
}

func (r *request) done() error {
	r.w.WriteHeader(http.StatusNoContent)
	return nil
}

// body reads a small body whole.
func (r *request) body(limit int64) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, tooLarge(limit)
	}
	_ = r.control.SetReadDeadline(time.Now().Add(bodyTime))
	b, err := io.ReadAll(http.MaxBytesReader(r.w, r.Body, limit))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, tooLarge(limit)
		}
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the body could not be read: %v", err)
	}
	_ = r.control.SetReadDeadline(time.Time{})
	return b, nil
}

func tooLarge(limit int64) error {
	return errdefs.New(errdefs.Invalid, "the body has more than %d bytes, the limit", limit).
		WithNext("send less at once").With("limit_bytes", strconv.FormatInt(limit, 10))
}

// decode reads a JSON body. A field this program does not know is refused: it
// could be a limit that would then not hold.
func (r *request) decode(limit int64, out any) error {
	b, err := r.body(limit)
	if err != nil {
		return err
	}
	if err := decodeStrict(b, out); err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "the body is not what it should be: %v", err)
	}
	return nil
}

// number reads a query parameter, def if it is absent.
func (r *request) number(name string, def, least, most int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return def, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < least || n > most {
		return 0, errdefs.New(errdefs.Invalid, "%s is not a number from %d to %d", name, least, most)
	}
	return n, nil
}

func (r *request) flag(name string) (bool, error) {
	switch r.URL.Query().Get(name) {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	}
	return false, errdefs.New(errdefs.Invalid, "%s is neither true nor false", name)
}

// slowBody is a large body; each part of it must come within bodyTime.
type slowBody struct {
	r *request
}

func (b slowBody) Read(p []byte) (int, error) {
	_ = b.r.control.SetReadDeadline(time.Now().Add(bodyTime))
	n, err := b.r.Body.Read(p)
	if err != nil {
		// Left set, it would end the request when the work after the body takes longer.
		_ = b.r.control.SetReadDeadline(time.Time{})
	}
	return n, err
}

// slowAnswer is a large answer. It knows whether it has begun.
type slowAnswer struct {
	r     *request
	kind  string
	begun bool
}

func (a *slowAnswer) Write(p []byte) (int, error) {
	if !a.begun {
		a.begun = true
		a.r.w.Header().Set("Content-Type", a.kind)
	}
	_ = a.r.control.SetWriteDeadline(time.Now().Add(bodyTime))
	n, err := a.r.w.Write(p)
	_ = a.r.control.SetWriteDeadline(time.Time{}) // it would hold for the connection's next request
	return n, err
}

func decodeStrict(b []byte, out any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(out); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("something follows the value")
	}
	return nil
}
