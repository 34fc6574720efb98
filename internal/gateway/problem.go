package gateway

import (
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// problem is an error as the gateway answers it: an ordinary problem, and the
// member that the vendors' clients look for when they print what went wrong.
type problem struct {
	api.Problem
	Error vendorError `json:"error"`
}

type vendorError struct {
	Type    string `json:"type"`
	Message string `json:"message"`
}

// writeProblem answers with e. status 0 is the usual status of its code.
func writeProblem(w http.ResponseWriter, status int, e *errdefs.Error) {
	p, body := problemBody(status, e)
	h := w.Header()
	h.Set("Content-Type", api.ProblemType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	if p == http.StatusTooManyRequests {
		h.Set("Retry-After", "1")
	}
	w.WriteHeader(p)
	_, _ = w.Write(body) // the caller may be gone; there is nobody else to tell
}

func problemBody(status int, e *errdefs.Error) (int, []byte) {
	p := problem{Problem: api.ProblemOf(e, "")}
	if status != 0 {
		p.Status = status
	}
	p.Error = vendorError{Type: string(e.Code), Message: e.Error()}
	body, err := json.Marshal(p)
	if err != nil { // strings and numbers only: cannot happen
		body = []byte(`{"code":"internal"}`)
	}
	return p.Status, body
}
