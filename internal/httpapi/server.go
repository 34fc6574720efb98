package httpapi

import (
	"context"
	"net/http"
	"reflect"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func (h *Handler) registerMetrics(b *builder) {
	op, rt := b.operation(spec{id: "metrics", method: http.MethodGet, path: "/v1/metrics", action: authz.MetricsRead, tag: "server",
		summary: "Metrics", description: "In the Prometheus text form.", errors: []errdefs.Code{errdefs.NotFound}})
	op.Responses["200"] = &huma.Response{Description: "Metrics.",
		Content: map[string]*huma.MediaType{"text/plain": {Schema: &huma.Schema{Type: "string"}}}}
	var scrape http.Handler
	if h.cfg.Metrics != nil {
		scrape = h.cfg.Metrics.Handler()
	}
	rawOp(b, op, rt, func(w http.ResponseWriter, r *http.Request) error {
		if scrape == nil {
			return errdefs.New(errdefs.NotFound, "this server keeps no metrics")
		}
		// A ledger that does not answer must not hide the rest.
		if targets, err := h.cfg.Broker.Targets(r.Context(), principalOf(r.Context())); err == nil {
			h.cfg.Metrics.SetTargets(targets.Items)
		}
		st := h.cfg.Broker.Stats()
		h.cfg.Metrics.SetBroker(st.Owners, st.Unclassified, st.Streams)
		scrape.ServeHTTP(w, r)
		return nil
	})
}

func (h *Handler) registerServer(b *builder) {
	type healthOut struct {
		Status int
		Body   api.Health
	}
	jsonOp(b, spec{id: "health", method: http.MethodGet, path: "/v1/health", action: public, tag: "server",
		summary:     "Health",
		description: "Whether the server works. With status starting it answers requests, and has not tried every target yet; with failing it must be restarted."},
		func(context.Context, authz.Principal, *nothing) (*healthOut, error) {
			out := &healthOut{Status: http.StatusOK, Body: api.Health{Status: "ok", Version: h.cfg.Version}}
			if h.cfg.Health != nil {
				out.Body.Status = h.cfg.Health()
			}
			if out.Body.Status == "failing" { // probes look at the status code
				out.Status = http.StatusServiceUnavailable
			}
			return out, nil
		})
	b.find(http.MethodGet, "/v1/health").Responses["503"] = &huma.Response{Description: "The status is failing.",
		Content: map[string]*huma.MediaType{jsonMedia: {Schema: b.schema(reflect.TypeFor[api.Health]())}}}

	op, rt := b.operation(spec{id: "openapi", method: http.MethodGet, path: "/openapi.json", action: anyone, basic: true, tag: "server",
		summary: "This document", description: "The OpenAPI 3.1 document of this API."})
	op.Responses["200"] = &huma.Response{Description: "The document.",
		Content: map[string]*huma.MediaType{jsonMedia: {Schema: &huma.Schema{Type: "object", AdditionalProperties: true}}}}
	rawOp(b, op, rt, func(w http.ResponseWriter, _ *http.Request) error {
		w.Header().Set("Content-Type", jsonMedia)
		w.Header().Set("Content-Length", strconv.Itoa(len(h.doc)))
		_, _ = w.Write(h.doc)
		return nil
	})

	op, rt = b.operation(spec{id: "docs", method: http.MethodGet, path: "/docs", action: anyone, basic: true, tag: "server",
		summary: "The docs page", description: "This API for people. Needs nothing from elsewhere."})
	op.Responses["200"] = &huma.Response{Description: "An HTML page.",
		Content: map[string]*huma.MediaType{"text/html": {Schema: &huma.Schema{Type: "string"}}}}
	rawOp(b, op, rt, func(w http.ResponseWriter, _ *http.Request) error {
		head := w.Header()
		head.Set("Content-Type", "text/html; charset=utf-8")
		head.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		head.Set("Referrer-Policy", "no-referrer")
		head.Set("Content-Length", strconv.Itoa(len(h.page)))
		_, _ = w.Write(h.page)
		return nil
	})
}
