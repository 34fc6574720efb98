from langbot_plugin.api.definition.components.page import Page, PageRequest, PageResponse


class Board(Page):
    async def handle_api(self, request: PageRequest) -> PageResponse:
        if request.endpoint == "/fail":
            return PageResponse.fail("told to fail")
        return PageResponse.ok({"endpoint": request.endpoint, "method": request.method, "body": request.body})
