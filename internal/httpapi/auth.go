package httpapi

import (
	"net/http"
	"strings"

	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// maxCredential bounds what is taken for a credential; a real one has 84 bytes.
const maxCredential = 512

// authenticate finds out who asks, and with what. Bearer is accepted everywhere; Basic, with
// the credential as the password, only where a browser may look around.
func (h *Handler) authenticate(r *http.Request, rt *route) (authz.Principal, credentialGiven, error) {
	basic := rt != nil && rt.basic
	credential, err := credentialOf(r, basic)
	if err == nil {
		var p authz.Principal
		if p, err = h.cfg.Tenants.Authenticate(r.Context(), credential); err == nil {
			return p, credentialGiven(credential), nil
		}
	}
	if !errdefs.Is(err, errdefs.Unauthenticated) {
		return authz.Principal{}, "", err
	}
	f := h.fail(r.Context(), err)
	if basic { // what makes a browser ask
		f.header.Add("WWW-Authenticate", `Basic realm="stockade: any name, your key as the password", charset="UTF-8"`)
	}
	return authz.Principal{}, "", f
}

func credentialOf(r *http.Request, basic bool) (string, error) {
	const next = "send 'Authorization: Bearer KEY' with a workspace key, an admin key or a run token"
	values := r.Header.Values("Authorization")
	switch {
	case len(values) == 0:
		return "", errdefs.New(errdefs.Unauthenticated, "no credential was given").WithNext(next)
	case len(values) > 1:
		return "", errdefs.New(errdefs.Unauthenticated, "the request has %d Authorization headers", len(values)).WithNext(next)
	case len(values[0]) > maxCredential:
		return "", errdefs.New(errdefs.Unauthenticated, "the credential is too long to be one").WithNext(next)
	}
	scheme, rest, _ := strings.Cut(values[0], " ")
	switch {
	case strings.EqualFold(scheme, "Bearer"):
		return strings.TrimSpace(rest), nil
	case strings.EqualFold(scheme, "Basic") && basic:
		if _, password, ok := r.BasicAuth(); ok {
			return password, nil
		}
		return "", errdefs.New(errdefs.Unauthenticated, "the Basic credential cannot be read").WithNext(next)
	}
	return "", errdefs.New(errdefs.Unauthenticated, "this kind of credential is not accepted here").WithNext(next)
}
