// Package httpapi is the public HTTP API, version 1: it checks who asks, decodes
// and bounds what is asked, calls the owners (broker, box, tenant) and turns
// their answers and errors into HTTP. It decides nothing about processes.
//
// Every request goes through the same steps, in [Handler.ServeHTTP]: credential,
// route, right of this kind of credential, query, media type, size of the body;
// only then does the operation see it (P11). Every error, from whichever step,
// is an api.Problem.
//
// Operations that exchange JSON are described by Go types from which huma makes
// the OpenAPI document and the validation. Operations that carry byte streams -
// files, images, input, the log, the attach socket - read the request themselves
// and describe themselves by hand, so that no byte of theirs passes through a
// generic layer.
package httpapi
