package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// writeJSON answers 200 with v.
func writeJSON(w http.ResponseWriter, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "the answer could not be encoded")
	}
	w.Header().Set("Content-Type", jsonMedia)
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	_, _ = w.Write(b.Bytes()) // a caller that is gone does not matter
	return nil
}

// asError returns the *errdefs.Error in err's chain, which must have one.
func asError(err error) *errdefs.Error {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		return errdefs.Wrap(err, errdefs.Internal, "the server could not do this")
	}
	return e
}
